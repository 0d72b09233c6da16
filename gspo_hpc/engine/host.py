"""The process of an engine: it imports vLLM, owns a ``vllm.LLM``, and does what its owner asks, one call at a time.

``python -m gspo_hpc.engine.host DESCRIPTOR`` serves the connection at that file descriptor, and ends with it.
:mod:`gspo_hpc.engine.client` is the other end. A rank thus neither imports vLLM, which takes longer than everything
else that it imports, nor shares its memory, threads and signals with it. On the CPU vLLM's core runs in this process;
on GPUs it has one of its own, so that a step is computed while the results of the one before are read.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gspo_hpc.system.environment import ENGINE_OWNER
from gspo_hpc.system.malloc import uncollected
from gspo_hpc.system.processes import die_with_parent

if TYPE_CHECKING:
    from gspo_hpc.data.records import Floats
    from gspo_hpc.engine.messages import Answer, Sampled, Submission


class Host:
    """The calls that an owner can make, each a method."""

    _llm: Any = None
    _tokenizer: Any = None

    def __init__(self) -> None:
        self.broken = False  # an error left vLLM's core in an unknown state
        self._asked: dict[str, tuple[Submission, int]] = {}  # by request id, with its seed
        self._sampled: dict[str, Sampled] = {}  # by request id

    def start(self, arguments: dict[str, Any]) -> None:
        """Make the ``vllm.LLM`` of these arguments: processes, weights, cache.

        Raises what vLLM raises for the arguments themselves, and RuntimeError for what they lead to later.
        """
        from vllm import LLM

        from gspo_hpc.engine import compat
        from gspo_hpc.engine.outputs import gist

        try:
            self._llm = LLM(**arguments)
        except Exception as error:
            if compat.is_of_the_core(error):
                raise RuntimeError(f"{type(error).__name__}: {gist(error)}") from error
            raise
        self._tokenizer = self._llm.get_tokenizer()

    def close(self) -> None:
        """Have vLLM end its processes and remove its files and sockets."""
        from gspo_hpc.engine import compat

        if self._llm is not None:
            compat.shut_down(self._llm)

    def step(self, submissions: Sequence[Submission]) -> list[Answer]:
        """Add these requests, run one step of the engine, and return the completions that it finished."""
        from gspo_hpc.engine import compat, requests
        from gspo_hpc.engine.adapters import loader
        from gspo_hpc.engine.messages import Sampled
        from gspo_hpc.engine.outputs import add_sampled

        engine = self._llm.llm_engine
        try:
            for submission in submissions:
                prompt, named = compat.token_prompt(submission.tokens), loader.request(submission.version)
                in_steps = submission.may_stop
                for request, seed in submission.requests:
                    begun = submission.begun.get(request)
                    sampled = Sampled() if begun is None else begun
                    wanted = requests.completion(
                        submission.sampling, seed, begun=len(sampled.tokens), in_steps=in_steps
                    )
                    whole = prompt if begun is None else compat.token_prompt([*submission.tokens, *begun.tokens])
                    engine.add_request(request, whole, wanted, lora_request=named)
                    self._asked[request], self._sampled[request] = (submission, seed), sampled
        except Exception:
            self.broken = True  # the owner would wait for the requests that were not added
            raise
        outputs = [output for output in self._advance() if output.request_id in self._asked]
        for output in outputs:
            add_sampled(self._sampled[output.request_id], output.outputs[0])
        return [self._answer(output) for output in outputs if output.finished]

    def _advance(self) -> list[Any]:
        try:
            return list(self._llm.llm_engine.step())
        except Exception:
            self.broken = True
            raise

    def _answer(self, output: Any) -> Answer:
        from gspo_hpc.engine.messages import Answer
        from gspo_hpc.engine.outputs import as_completion, reported_experts

        submission, seed = self._asked.pop(output.request_id)
        sampled, reason = self._sampled.pop(output.request_id), str(output.outputs[0].finish_reason)
        completion = as_completion(self._tokenizer, sampled, reason, seed, output.num_cached_tokens or 0)
        if not submission.experts:
            return Answer(output.request_id, completion)
        of_prompt, of_completion = reported_experts(output.outputs[0], len(submission.tokens))
        first = submission.requests[0][0] == output.request_id  # the prompt's are the same for all
        return Answer(output.request_id, replace(completion, experts=of_completion), of_prompt if first else None)

    def abort(self, requests: Sequence[str]) -> None:
        """Drop these requests."""
        self.stop(requests)

    def stop(self, requests: Sequence[str]) -> dict[str, Sampled]:
        """Drop these requests, and return by id what was sampled of those whose submission says that it may be asked.

        Of others nothing is known before they are finished.
        """
        asked = {request: self._asked.pop(request, None) for request in requests}
        sampled = {request: self._sampled.pop(request, None) for request in requests}
        self._llm.llm_engine.abort_request(list(requests))
        return {name: one for name, one in sampled.items() if one is not None and asked[name] is not None}

    def prompt_logprobs(
        self, names: Sequence[str], sequences: Sequence[Sequence[int]], version: int | None
    ) -> list[Floats]:
        """Return the log-probs [len - 1] of all tokens but the first.

        `names` are the ids of the requests; `version` is that of the adapters to compute with, here and below.
        """
        import numpy as np

        outputs = self._outputs_of(names, sequences, version, prompt_logprobs=0)
        return [
            np.array(
                [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)],
                dtype=np.float32,
            )
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def top_logprobs(
        self, names: Sequence[str], sequences: Sequence[Sequence[int]], version: int | None, count: int
    ) -> list[Floats]:
        """Return the log-probs [len - 1, count] of the most likely tokens after each token but the last."""
        import numpy as np

        outputs = self._outputs_of(names, sequences, version, prompt_logprobs=count)
        return [
            np.array(
                [sorted((each.logprob for each in entry.values()), reverse=True)[:count] for entry in entries],
                dtype=np.float32,
            )
            for entries in (output.prompt_logprobs[1:] for output in outputs)
        ]

    def cached_tokens(self, name: str, tokens: Sequence[int], version: int | None) -> int:
        """Return how many of these tokens came from the prefix cache; `name` is the id of the request."""
        (output,) = self._outputs_of([name], [tokens], version, prompt_logprobs=None)
        return output.num_cached_tokens or 0

    def _outputs_of(
        self,
        names: Sequence[str],
        sequences: Sequence[Sequence[int]],
        version: int | None,
        *,
        prompt_logprobs: int | None,
    ) -> list[Any]:
        """Return vLLM's output for each of these prompts."""
        from gspo_hpc.engine import compat, requests
        from gspo_hpc.engine.adapters import loader

        named = loader.request(version)
        for name, tokens in zip(names, sequences, strict=True):
            prompt = compat.token_prompt(tokens)
            self._llm.llm_engine.add_request(name, prompt, requests.probe(prompt_logprobs), lora_request=named)
        found: dict[str, Any] = {}
        while len(found) < len(sequences):
            found |= {output.request_id: output for output in self._advance() if output.request_id in names}
        return [found[name] for name in names]

    def classify(self, names: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logits of each of these sequences, one for each label of the model."""
        from gspo_hpc.engine import compat, requests

        for name, tokens in zip(names, sequences, strict=True):
            self._llm.llm_engine.add_request(name, compat.token_prompt(tokens), requests.logits())
        found: dict[str, list[float]] = {}
        while len(found) < len(sequences):
            found |= {one.request_id: one.outputs.data.tolist() for one in self._advance() if one.finished}
        return [found[name] for name in names]

    def ask_workers(self, method: str) -> list[Any] | None:
        """Return what each worker answers to a method of WorkerMethods that takes nothing.

        None where one fails, because a layer is built otherwise than the method expects.
        """
        try:
            return list(self._llm.collective_rpc(method))
        except Exception:
            traceback.print_exc()  # into the engine's log
            return None

    def llm(self, method: str, *arguments: Any) -> Any:
        """Return the result of a public method of ``vllm.LLM``."""
        return getattr(self._llm, method)(*arguments)


def serve(connection: Connection, host: Host) -> None:
    """Answer the owner's calls, ``(method, arguments)``, until it closes the connection or is gone."""
    from gspo_hpc.engine import compat
    from gspo_hpc.engine.messages import Failure
    from gspo_hpc.engine.outputs import gist

    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            host.close()
            return
        try:
            answer = getattr(host, method)(*arguments)
        except Exception as error:
            traceback.print_exc()  # into the engine's log
            classes = tuple(base.__name__ for base in type(error).__mro__)
            answer = Failure(gist(error), classes, host.broken or compat.is_engine_dead(error))
        connection.send(answer)


def main(descriptor: int) -> None:
    """Serve the connection at `descriptor`, which the owner's process has made."""
    die_with_parent(int(os.environ[ENGINE_OWNER]))
    os.set_inheritable(descriptor, False)  # else it stays open as long as a process that this one has started
    with uncollected():
        import vllm.entrypoints.llm  # noqa: F401

        from gspo_hpc.engine import messages, plugin  # noqa: F401

        plugin.prepare()
    serve(Connection(descriptor), Host())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the owner is gone or has closed: nothing of vLLM's is worth waiting for
