"""A vLLM engine: start and end it, sample groups of completions, give it new weights, and notice when it is dead.

The engine is a plain ``vllm.LLM`` (0.22 to 0.33) in a process of its own (:mod:`gspo_hpc.engine.host`), so nothing of
the trainer's process leaks into it. This side waits for each answer with a time limit: an engine that was killed or
hangs costs an :class:`EngineDied`, never a blocked rank.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.data.records import Completion, Floats, Group, Prompt
from gspo_hpc.engine import requests, transfer
from gspo_hpc.engine.client import Client, EngineDied
from gspo_hpc.engine.constants import held as constants
from gspo_hpc.engine.messages import Sampled
from gspo_hpc.engine.outputs import gist, one_line, root_cause
from gspo_hpc.engine.processes import START_SECONDS
from gspo_hpc.engine.requests import PendingGroup
from gspo_hpc.engine.settings import (
    EngineSettings,
    Sampling,
    arguments,
    environment,
    has_plugin,
    refuse_own_arguments,
)
from gspo_hpc.engine.updates import AdapterUpdate, WeightUpdate
from gspo_hpc.ops import expert_sums
from gspo_hpc.ops.weight_parts import Stream

__all__ = ["Engine", "EngineDied", "EngineSettings", "Sampling"]

_NOT_RUNNING = "it is not running: its last start failed"
_TAGS = ("weights", "kv_cache")  # of vLLM's memory that sleeps


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
        self._groups: dict[int, PendingGroup] = {}
        self._unsent: list[int] = []
        self._requests: dict[str, tuple[int, int]] = {}  # request id -> slot, sample
        self._ids = itertools.count()
        self._client: Client | None = None
        self._weight_sender: transfer.WeightSender | None = None  # where nobody else keeps one
        self._asleep: list[str] = []  # tags of the memory that is not there
        self._emptied = False  # has had no weights since it started so, or slept at level 2
        self._versions = itertools.count(1)  # of adapters, over the life of this object
        self._version: int | None = None  # of those that requests name; None: it has none

    @property
    def pending(self) -> int:
        """Number of groups that were submitted and not returned yet."""
        return len(self._groups)

    @property
    def running(self) -> int:
        """Number of completions that the engine is working on."""
        return len(self._requests)

    @property
    def lacks_weights(self) -> bool:
        """True if it has had no weights since it started without them, or since it slept at level 2."""
        return self._emptied

    def pids(self) -> list[int]:
        """Return the process ids of the engine: its own, core and workers; an empty list when it does not run."""
        return self._client.processes.pids() if self._client is not None else []

    # ---- start, end, sleep

    def start(self) -> None:
        """Start the processes and load the model.

        Raises ValueError where the user's settings are at fault, RuntimeError for every other failure.
        """
        assert self._client is None, "already started"
        settings = self.settings
        if not has_plugin():
            raise ValueError("gspo_hpc is not installed where vLLM looks for plugins: pip install -e . (in its folder)")
        self._asleep, self._emptied, self._version = [], not settings.loads_weights, None
        atexit.register(self.close)
        try:
            self._client = Client(environment(settings), settings.log_path)
            self._call("start", arguments(settings, transfer.BACKEND), seconds=START_SECONDS)
            self._client.processes.find()
            if settings.starts_asleep:
                self.sleep(2)
        except BaseException as error:
            log = self._client.processes.excerpt() if self._client is not None else ""
            self.close()
            if isinstance(error, ValueError):
                raise ValueError(f"vLLM refuses these settings: {gist(error)}") from error
            if isinstance(error, Exception):
                where = f"in {settings.log_path}" if settings.log_path else "above"
                why = root_cause(log) or gist(error)
                raise RuntimeError(f"vLLM did not start: {one_line(why)}. Its own output is {where}") from error
            raise

    def close(self) -> None:
        """Kill every process of the engine. Unfinished groups are kept for :meth:`restart`. May be called twice."""
        if self._client is not None:
            self._client.close()
        if self._weight_sender is not None:
            self._weight_sender.close()
        self._client = self._weight_sender = None
        self._requests.clear()
        self._unsent.clear()
        atexit.unregister(self.close)

    def restart(self) -> None:
        """Replace the engine's processes with new ones, which have the weights of `model_path`, or none.

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
        if level == 2:
            self._emptied, self._version = True, None
        if self.settings.platform == "cpu" or len(self._asleep) == len(_TAGS):
            return
        if self._asleep:  # a sync was left in the middle; what vLLM does then depends on its version
            assert self._client is not None
            self._client.kill("a weight sync left it half awake")
            return
        self._llm("sleep", level)
        self._asleep = list(_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo :meth:`sleep`; `tags` limits it to "weights" or "kv_cache". Does nothing on the CPU."""
        # vLLM before 0.29 maps memory that is awake a second time if it is asked for all of it, and fails.
        if wanted := [tag for tag in self._asleep if tags is None or tag in tags]:
            self._llm("wake_up", wanted)
            self._asleep = [tag for tag in self._asleep if tag not in wanted]

    def suspend(self, level: int = 1) -> None:
        """Sleep in the middle of generation: what is being sampled is dropped, unfinished groups are kept.

        :meth:`wake_up` and :meth:`resubmit` go on, at level 2 after :meth:`update_weights`. Where the engine is dead,
        the next call raises EngineDied, not this.
        """
        self._drop_requests()
        if not self._is_dead():
            with contextlib.suppress(EngineDied):
                self.sleep(level)

    # ---- generation

    def submit(
        self,
        slot: int,
        prompt: Prompt,
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        reports_experts: bool = True,
        begun: Sequence[Completion] = (),
        may_stop: bool = False,
    ) -> None:
        """Ask for one completion of `prompt` per seed; :meth:`step` returns them as one group.

        They have the experts of their tokens if the engine's settings and `reports_experts` say so. `begun` has a
        completion for each seed, as :meth:`stop` returned it: those that are not finished go on behind their last
        token. `may_stop`: it may be called. Raises ValueError where the prompt and `max_tokens` exceed the engine's
        context length.
        """
        assert slot not in self._groups and len(seeds) > 0
        total = len(prompt.tokens) + sampling.max_tokens
        if total > self.settings.max_model_len:
            raise ValueError(
                f"prompt {prompt.index} has {len(prompt.tokens)} tokens: with {sampling.max_tokens} new ones that is "
                f"{total}, and the engine takes at most {self.settings.max_model_len}"
            )
        known = dict(enumerate(begun))
        experts = self.settings.report_experts and reports_experts
        self._groups[slot] = PendingGroup(slot, prompt, tuple(seeds), sampling, known, experts, may_stop)
        self._unsent.append(slot)

    def resubmit(self) -> None:
        """Sample unfinished groups again with their seeds, from where they were submitted or held."""
        for pending in self._groups.values():
            pending.start_over()
        self._unsent = list(self._groups)

    def step(self) -> list[Group]:
        """Run one step of the engine, and return the groups that it finished.

        Returns at once when there is nothing to do. Raises EngineDied when the engine's processes are gone or gave no
        answer for `timeout` seconds, RuntimeError while it has no weights.
        """
        if not self._requests and not self._unsent:
            return []
        self._require_weights()
        changed = dict.fromkeys(self._unsent)  # perhaps nothing is left to be sampled of them
        submissions, made = requests.submissions(self._groups, self._unsent, self._ids, self._version)
        self._requests.update(made)
        self._unsent.clear()
        for answer in self._call("step", submissions) if self._requests else ():
            if answer.request not in self._requests:
                continue  # its group was aborted
            slot, sample = self._requests.pop(answer.request)
            self.tokens_generated += self._groups[slot].add(sample, answer)
            changed[slot] = None
        return [self._groups.pop(slot).group() for slot in changed if self._groups[slot].is_whole]

    def stop(self) -> list[Group]:
        """Drop all unfinished groups, and return them with what was sampled of them.

        Their completions that are not finished have UNFINISHED as their reason to end. All groups were submitted with
        `may_stop`. Where the engine is dead, what it sampled since they were submitted is lost.
        """
        self._take_sampled()
        stopped = [pending.group() for pending in self._groups.values()]
        self.abort()
        return stopped

    def hold(self, weights_version: int) -> None:
        """Stop unfinished groups, of which these weights sampled what is there; :meth:`resubmit` continues them."""
        self._take_sampled()
        self._unsent.clear()
        for pending in self._groups.values():
            pending.hold(weights_version)

    def _take_sampled(self) -> None:
        """Drop the engine's requests, and take what it has sampled of them."""
        sampled: dict[str, Sampled] = {}
        if self._requests and not self._is_dead():
            with contextlib.suppress(EngineDied):
                sampled = self._call("stop", list(self._requests))
        for request, one in sampled.items():
            slot, sample = self._requests[request]
            self.tokens_generated += self._groups[slot].note(sample, one)
        self._requests.clear()

    def abort(self) -> None:
        """Drop all unfinished groups. Where the engine is dead, the next call raises EngineDied, not this one."""
        self._groups.clear()
        self._drop_requests()

    def _drop_requests(self) -> None:
        ids = list(self._requests)
        self._unsent.clear()
        self._requests.clear()
        if ids and not self._is_dead():
            with contextlib.suppress(EngineDied):
                self._call("abort", ids, seconds=10.0)

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """Return the log-probs [len - 1] of all tokens but the first of each sequence, at temperature 1, float32.

        They are computed, not read from the prefix cache. Raises EngineDied and RuntimeError like :meth:`step`.
        """
        return list(self._call("prompt_logprobs", *self._probing(sequences), self._version))

    def top_logprobs(self, sequences: Sequence[Sequence[int]], count: int) -> list[Floats]:
        """Return the log-probs [len - 1, count] of the most likely tokens after each token but the last, falling.

        They are computed like those of :meth:`prompt_logprobs`; vLLM gives at most 20, or fewer tokens where the user's
        `max_logprobs` says so.
        """
        most = int(self.settings.engine_args.get("max_logprobs", -1))
        wanted = count if most < 0 else min(count, most)
        return list(self._call("top_logprobs", *self._probing(sequences), self._version, wanted))

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt the engine read from its prefix cache, in which all of them are then.

        Raises EngineDied and RuntimeError like :meth:`step`.
        """
        names, (sequence,) = self._probing([tokens])
        return int(self._call("cached_tokens", names[0], sequence, self._version))

    def expert_sums(self, layers: int, experts: int) -> Floats | None:
        """Return the sums [layers, experts, 4] of the experts that the engine computes with, NaN for those not known.

        See gspo_hpc.ops.expert_sums. None where the workers cannot say them, or have a class of the user's own. Raises
        EngineDied and RuntimeError like :meth:`step`.
        """
        workers = self._ask_workers("expert_sums")
        return None if workers is None else expert_sums.added(workers, layers, experts)

    def constants(self) -> list[constants.Held]:
        """Return the constants of each worker's model, none where :meth:`expert_sums` is None; raise as it does."""
        return [constants.from_values(values) for values in self._ask_workers("constants") or ()]

    def _ask_workers(self, method: str) -> Any:
        self._require_weights()
        return None if "worker_extension_cls" in self.settings.engine_args else self._call("ask_workers", method)

    def _probing(self, sequences: Sequence[Sequence[int]]) -> tuple[list[str], list[list[int]]]:
        """Return names for the requests of these prompts, and the prompts as lists."""
        assert not self._requests, "not while it generates"
        assert all(len(tokens) >= 2 for tokens in sequences)
        self._require_weights()
        return [f"probe-{next(self._ids)}" for _ in sequences], [list(tokens) for tokens in sequences]

    def _require_weights(self) -> None:
        without_adapters = self.settings.adapters is not None and self._version is None
        lacks = "weights" if self._emptied else "adapters" if without_adapters else None
        if lacks and not self._is_dead():
            raise RuntimeError(f"the engine started without {lacks} or slept at level 2: send it all of them first")

    # ---- weights

    def update_weights(self, stream: Stream, sender: transfer.WeightSender | None = None) -> None:
        """Give the engine new weights: full tensors under their Hugging Face names, each exactly once.

        The stream is always iterated to its end, also when the engine fails, because producing it may be a collective
        of all ranks; they meet in `sender`, where an engine has several GPUs. Raises ValueError for a stream that is
        not this model's, EngineDied, or RuntimeError where vLLM refuses the weights; after any of them the engine has
        no usable weights and is dead until :meth:`restart`. Adapters have to come again afterwards.
        """
        check, self._version = transfer.StreamCheck(self._shapes, self._tied), None
        self._send(stream, sender, lambda client: WeightUpdate(client, self.settings.timeout, check))
        self._emptied = False

    def update_adapters(self, stream: Stream, sender: transfer.WeightSender | None = None) -> None:
        """Give the engine the next version of its adapters, whole, beside weights that stay as they are.

        Requests name it from now on, and the version before is forgotten. All else is as :meth:`update_weights` has it.
        """
        adapters, version = self.settings.adapters, next(self._versions)
        assert adapters is not None, "the engine has no room for adapters"
        self._version = None
        self._send(stream, sender, lambda client: AdapterUpdate(client, self.settings.timeout, adapters, version))
        self._version = version

    def _send(
        self, stream: Stream, sender: transfer.WeightSender | None, update: Callable[[Client], WeightUpdate]
    ) -> None:
        """Take the stream to its end; see :meth:`update_weights`."""
        assert not self._requests, "not while it generates"
        if sender is None:
            settings = self.settings
            self._weight_sender = sender = self._weight_sender or transfer.WeightSender(
                settings.platform, settings.tensor_parallel_size, settings.bucket_bytes
            )
        if self._client is None:
            sender.send(stream)
            raise EngineDied(_NOT_RUNNING)
        try:
            sender.send(stream, update(self._client))
            self.reset_prefix_cache()
        except BaseException as error:
            if not isinstance(error, EngineDied):
                assert self._client is not None
                self._client.kill("a weight update failed")
            raise

    def reset_prefix_cache(self) -> None:
        """Have the engine forget all keys and values, also those of requests that run: it computes them again.

        Raises RuntimeError where vLLM keeps any of them.
        """
        # Without True, vLLM keeps the whole cache as long as one block of it is in use, and says so by its result only.
        if not self._llm("reset_prefix_cache", True):
            raise RuntimeError("vLLM did not reset its prefix cache: keys and values of old weights may be in it")

    # ---- calls

    def _is_dead(self) -> bool:
        return self._client is None or self._client.dead is not None

    def _llm(self, method: str, *arguments: Any) -> Any:
        """Return the result of a public method of the ``vllm.LLM``."""
        return self._call("llm", method, *arguments)

    def _call(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Return the answer to a call of the host; wait at most `seconds`, by default `timeout`."""
        if self._client is None:
            raise EngineDied(_NOT_RUNNING)
        return self._client.call(seconds or self.settings.timeout, method, *arguments)
