"""A vLLM engine: start and end it, sample groups of completions, give it new weights, and notice when it is dead.

The engine is a plain ``vllm.LLM`` (0.22 to 0.33). Its core and workers are vLLM's own child processes. They are started
with spawn, so nothing of the trainer's process leaks into them. One thread makes all calls into vLLM, and this side
waits for it with a time limit: a core that was killed or hangs costs an :class:`EngineDied`, never a blocked rank.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import importlib.metadata
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_hpc.data.records import Completion, Experts, Floats, Group, Prompt
from gspo_hpc.engine import compat, processes, requests, transfer
from gspo_hpc.engine.outputs import as_completion, gist, one_line, reported_experts, root_cause
from gspo_hpc.engine.settings import EngineSettings, Sampling, arguments, environment, refuse_own_arguments

__all__ = ["Engine", "EngineDied", "EngineSettings", "Sampling"]

_POLL_SECONDS = 0.2  # between two checks that the engine's processes are alive
_TAGS = ("weights", "kv_cache")  # of vLLM's memory that sleeps


class EngineDied(RuntimeError):
    """Error raised when the engine's processes ended, or hung and were killed; :meth:`Engine.restart` recovers."""


@dataclass
class _Pending:
    """A group of completions that is being sampled."""

    prompt: Prompt
    seeds: tuple[int, ...]
    sampling: Sampling
    done: dict[int, Completion] = field(default_factory=dict)  # by sample
    prompt_experts: Experts | None = None


class Engine:
    """A vLLM engine that this process owns. Only one thread at a time may use it.

    In float32 on the CPU, a seed gives the same tokens and log-probs bit for bit, whatever else is in the batch and
    whatever the prefix cache holds.
    """

    def __init__(self, settings: EngineSettings) -> None:
        refuse_own_arguments(settings)
        self.settings = settings
        self.tokens_generated = 0  # in finished completions, over the life of this object
        self._shapes = transfer.checkpoint_shapes(Path(settings.model_path))
        config = json.loads((Path(settings.model_path) / "config.json").read_text())
        self._tied = bool(config.get("tie_word_embeddings", "lm_head.weight" not in self._shapes))
        self._groups: dict[int, _Pending] = {}
        self._unsent: list[int] = []
        self._requests: dict[str, tuple[int, int]] = {}  # request id -> slot, sample
        self._ids = itertools.count()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._caller: processes.Caller | None = None
        self._processes: processes.Processes | None = None
        self._staging: transfer.Staging | None = None
        self._dead: str | None = None  # the reason, until restart
        self._asleep: list[str] = []  # tags of the memory that is not there
        self._emptied = False  # slept at level 2 since the weights last came

    @property
    def pending(self) -> int:
        """Number of groups that were submitted and not returned yet."""
        return len(self._groups)

    @property
    def running(self) -> int:
        """Number of completions that the engine is working on."""
        return len(self._requests)

    def pids(self) -> list[int]:
        """Return the process ids of the engine's core and workers; an empty list when it does not run."""
        return self._processes.pids() if self._processes is not None else []

    # ---- start, end, sleep

    def start(self) -> None:
        """Start the processes and load the model.

        Raises ValueError where the user's settings are at fault, RuntimeError for every other failure.
        """
        assert self._caller is None, "already started"
        settings = self.settings
        if not any(e.name == "gspo_hpc" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
            raise ValueError("gspo_hpc is not installed where vLLM looks for plugins: pip install -e . (in its folder)")
        # Bytes in fp32, the largest that may come; pages are taken only when they are used.
        largest = 4 * max(math.prod(shape) for shape in self._shapes.values())
        self._dead, self._asleep, self._emptied = None, [], False
        self._staging = transfer.make_staging(
            settings.platform, settings.tensor_parallel_size, largest, settings.bucket_bytes
        )
        self._caller = processes.Caller()
        self._processes = processes.Processes()
        atexit.register(self.close)
        try:
            with self._processes.starting(environment(settings), settings.log_path):
                values = arguments(settings, self._staging.backend)
                self._llm = self._wait(self._caller.call(self._make_llm, values), processes.START_SECONDS)
            self._processes.find()
            init_info = {"init_info": self._staging.init_info()}
            self._call(lambda llm: llm.init_weight_transfer_engine(init_info))
            self._tokenizer = self._llm.get_tokenizer()
            if settings.starts_asleep:
                self.sleep(2)
        except BaseException as error:
            log = self._processes.excerpt() if self._processes is not None else ""
            self.close()
            if isinstance(error, (ValueError, TypeError)):
                raise ValueError(f"vLLM refuses these settings: {gist(error)}") from error
            if isinstance(error, Exception):
                where = f"in {settings.log_path}" if settings.log_path else "above"
                why = root_cause(log) or gist(error)
                raise RuntimeError(f"vLLM did not start: {one_line(why)}. Its own output is {where}") from error
            raise

    def close(self) -> None:
        """Kill every process of the engine. Unfinished groups are kept for :meth:`restart`. May be called twice."""
        if self._processes is not None:
            if self._dead is None:
                self._processes.terminate(2.0)
            self._processes.kill()
        if self._caller is not None:
            if self._llm is not None and self._dead is None:
                # A thread that is stuck in a call to a dead engine is left behind instead.
                closing = self._caller.call(compat.close_client, self._llm)
                concurrent.futures.wait([closing], timeout=10)
            self._caller.stop()
        if self._staging is not None:
            self._staging.close()
        self._caller = self._processes = self._staging = self._llm = self._tokenizer = None
        self._requests.clear()
        self._unsent.clear()
        atexit.unregister(self.close)

    def restart(self) -> None:
        """Replace the engine's processes with new ones, which have the weights of `model_path`.

        Unfinished groups are kept: give the engine its current weights, then call :meth:`resubmit`.
        """
        self.close()
        self.start()

    def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of the KV cache and of the weights.

        Level 1 moves the weights to host memory. Level 2 drops them: waking up returns parameters that hold noise, and
        the engine refuses to compute until :meth:`update_weights` has brought every tensor. On the CPU no memory moves,
        and the refusal is the same.
        """
        assert level in (1, 2), level
        assert not self._requests and not self._unsent, "an engine that generates cannot sleep"
        self._emptied |= level == 2
        if self.settings.platform == "cuda" and not self._asleep:
            self._call(lambda llm: llm.sleep(level))
            self._asleep = list(_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo :meth:`sleep`; `tags` limits it to "weights" or "kv_cache". Does nothing on the CPU."""
        # vLLM before 0.29 maps memory that is awake a second time if it is asked for all of it, and fails.
        if wanted := [tag for tag in self._asleep if tags is None or tag in tags]:
            self._call(lambda llm: llm.wake_up(wanted))
            self._asleep = [tag for tag in self._asleep if tag not in wanted]

    def suspend(self) -> None:
        """Sleep in the middle of generation: what is being sampled is dropped, unfinished groups are kept.

        :meth:`wake_up` and :meth:`resubmit` go on. Where the engine is dead, the next call raises EngineDied, not this.
        """
        self._drop_requests()
        if self._dead is None:
            with contextlib.suppress(EngineDied):
                self.sleep(1)

    # ---- generation

    def submit(self, slot: int, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> None:
        """Ask for one completion of `prompt` per seed; :meth:`step` returns them as one group.

        Raises ValueError where the prompt and `max_tokens` exceed the engine's context length.
        """
        assert slot not in self._groups and len(seeds) > 0
        total = len(prompt.tokens) + sampling.max_tokens
        if total > self.settings.max_model_len:
            raise ValueError(
                f"prompt {prompt.index} has {len(prompt.tokens)} tokens: with {sampling.max_tokens} new ones that is "
                f"{total}, and the engine takes at most {self.settings.max_model_len}"
            )
        self._groups[slot] = _Pending(prompt, tuple(seeds), sampling)
        self._unsent.append(slot)

    def resubmit(self) -> None:
        """Sample all unfinished groups again, from their first token and with their seeds."""
        for pending in self._groups.values():
            pending.done.clear()
        self._unsent = list(self._groups)

    def step(self) -> list[Group]:
        """Run one step of the engine, and return the groups that it finished.

        Returns at once when there is nothing to do. Raises EngineDied when the engine's processes are gone or gave no
        answer for `timeout` seconds, RuntimeError while it has no weights.
        """
        if not self._requests and not self._unsent:
            return []
        self._require_weights()
        outputs = self._call(lambda llm: self._advance(llm.llm_engine))
        finished = []
        for output in outputs:
            if output.request_id not in self._requests:
                continue  # its group was aborted
            slot, sample = self._requests.pop(output.request_id)
            pending = self._groups[slot]
            completion = as_completion(self._tokenizer, output.outputs[0], pending.seeds[sample])
            if self.settings.report_experts:
                experts = reported_experts(output.outputs[0], len(pending.prompt.tokens))
                completion = replace(completion, experts=experts[1])
                if sample == 0:
                    pending.prompt_experts = experts[0]
            pending.done[sample] = completion
            self.tokens_generated += len(completion.tokens)
            if len(pending.done) == len(pending.seeds):
                del self._groups[slot]
                completions = tuple(pending.done[i] for i in range(len(pending.seeds)))
                finished.append(Group(slot, pending.prompt, completions, pending.prompt_experts))
        return finished

    def abort(self) -> None:
        """Drop all unfinished groups. Where the engine is dead, the next call raises EngineDied, not this one."""
        self._groups.clear()
        self._drop_requests()

    def _drop_requests(self) -> None:
        ids = list(self._requests)
        self._unsent.clear()
        self._requests.clear()
        if ids and self._dead is None:
            with contextlib.suppress(EngineDied):
                self._call(lambda llm: llm.llm_engine.abort_request(ids), seconds=10.0)

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """Return the log-probs [len - 1] of all tokens but the first of each sequence, at temperature 1, float32.

        They are computed, not read from the prefix cache. Raises EngineDied and RuntimeError like :meth:`step`.
        """
        assert not self._requests, "not while it generates"
        assert all(len(tokens) >= 2 for tokens in sequences)
        self._require_weights()
        return list(self._call(lambda llm: self._probe(llm.llm_engine, sequences)))

    def _require_weights(self) -> None:
        if self._emptied:
            raise RuntimeError("the engine slept at level 2 and has no weights: send it all of them first")

    def _advance(self, engine: Any) -> list[Any]:
        while self._unsent:
            slot = self._unsent[0]
            pending = self._groups[slot]
            for sample, seed in enumerate(pending.seeds):
                params = requests.completion(pending.sampling, seed)
                request = f"{slot}-{sample}-{next(self._ids)}"
                engine.add_request(request, compat.token_prompt(pending.prompt.tokens.tolist()), params)
                self._requests[request] = (slot, sample)
            self._unsent.pop(0)
        return list(engine.step())

    def _probe(self, engine: Any, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        params = requests.probe()
        waiting = {f"probe-{next(self._ids)}": index for index in range(len(sequences))}
        for request, index in waiting.items():
            engine.add_request(request, compat.token_prompt(sequences[index]), params)
        found: dict[int, Floats] = {}
        while len(found) < len(sequences):
            for output in engine.step():
                if output.request_id in waiting:
                    index = waiting[output.request_id]
                    entries = zip(sequences[index][1:], output.prompt_logprobs[1:], strict=True)
                    found[index] = np.array([entry[token].logprob for token, entry in entries], dtype=np.float32)
        return [found[index] for index in range(len(sequences))]

    # ---- weights

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give the engine new weights: full tensors under their Hugging Face names, each exactly once.

        `tensors` is always iterated to its end, also when the engine fails, because producing it may be a collective of
        all ranks. Raises ValueError for a stream that is not this model's, EngineDied, or RuntimeError where vLLM
        refuses the weights; after any of them the engine has no usable weights and is dead until :meth:`restart`.
        """
        assert not self._requests, "not while it generates"
        source = iter(tensors)
        try:
            self._send(source)
        except BaseException as error:
            if not isinstance(error, EngineDied):
                self._kill("a weight update failed")
            if isinstance(error, Exception):
                for _ in source:
                    pass
            raise
        self._emptied = False

    def _send(self, source: Iterable[tuple[str, torch.Tensor]]) -> None:
        staging = self._staging
        self._call(lambda llm: llm.start_weight_update())
        assert staging is not None
        sending: Future[Any] | None = None

        def send() -> Future[Any]:
            info = {"update_info": staging.take()}
            self._answer(sending)
            assert self._caller is not None
            future = self._caller.call(self._llm.update_weights, info)
            if staging.slots == 1:
                self._answer(future)
            return future

        for name, tensor in transfer.checked(source, self._shapes, self._tied):
            if not staging.fits(tensor):
                sending = send()
            staging.put(name, tensor)
        self._answer(send())
        self._call(lambda llm: llm.finish_weight_update())
        staging.rest()
        if not self._call(lambda llm: llm.reset_prefix_cache()):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def _answer(self, sending: Future[Any] | None) -> None:
        if sending is not None:
            try:
                self._wait(sending, self.settings.timeout)
            except EngineDied:
                raise
            except Exception as error:
                raise RuntimeError(f"vLLM refuses the weights: {gist(error)}") from error

    # ---- calls

    def _call(self, function: Callable[[Any], Any], seconds: float | None = None) -> Any:
        """Return `function(llm)`, called in the engine's thread; wait at most `seconds`, by default `timeout`."""
        if self._dead is not None:
            raise EngineDied(self._dead)
        assert self._caller is not None and self._llm is not None, "not started"
        return self._wait(self._caller.call(function, self._llm), seconds or self.settings.timeout)

    def _wait(self, future: Future[Any], seconds: float) -> Any:
        assert self._processes is not None
        deadline = time.monotonic() + seconds
        while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
            if (gone := self._processes.gone()) is not None:
                raise self._kill(f"its process {gone} is gone")
            if time.monotonic() > deadline:
                raise self._kill(f"no answer for {seconds:g} s")
        error = future.exception()
        if error is None:
            return future.result()
        if compat.is_engine_dead(error) or self._processes.gone() is not None:
            raise self._kill(one_line(root_cause(self._processes.excerpt()) or gist(error))) from error
        raise error

    def _kill(self, reason: str) -> EngineDied:
        """Mark the engine as dead, kill what is left of it, and return the error to raise."""
        if self._dead is None:
            self._dead = reason
            if self._processes is not None:
                self._processes.kill()
        return EngineDied(reason)

    @staticmethod
    def _make_llm(arguments: dict[str, Any]) -> Any:
        from vllm import LLM

        return LLM(**arguments)
