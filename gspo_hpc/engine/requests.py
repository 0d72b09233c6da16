"""The requests that an engine is sent: groups of completions, and their sampling parameters as vLLM takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gspo_hpc.data.records import UNFINISHED, Completion, Experts, Group, Prompt
from gspo_hpc.engine.messages import Answer, Sampled, Submission
from gspo_hpc.engine.settings import Sampling


@dataclass
class PendingGroup:
    """A group of completions that is being sampled."""

    slot: int
    prompt: Prompt
    seeds: tuple[int, ...]
    sampling: Sampling
    begun: Mapping[int, Completion] = field(default_factory=dict)  # by sample, what was sampled before
    reports_experts: bool = False
    may_stop: bool = False  # what was sampled may be asked for before it is finished
    _made: dict[int, Completion] = field(default_factory=dict)  # by sample, since it was submitted or started over
    _prompt_experts: Experts | None = None

    @property
    def is_whole(self) -> bool:
        """True if all completions are finished."""
        return all(self._completion(sample).finish_reason != UNFINISHED for sample in range(len(self.seeds)))

    def hold(self, weights_version: int) -> None:
        """Keep what was sampled by these weights; what is missing goes on behind it, with other random numbers."""
        self.begun = {
            sample: found.with_piece(weights_version)
            for sample in range(len(self.seeds))
            if len((found := self._completion(sample)).tokens)
        }
        self._made.clear()
        # A seed's random numbers begin anew with each request: behind the tokens of one they would come a second time.
        self.seeds = tuple(_next_seed(seed, weights_version) for seed in self.seeds)

    def start_over(self) -> None:
        """Forget what was sampled since it was submitted."""
        self._made.clear()

    def submission(self, ids: Iterator[int], version: int | None) -> tuple[Submission, dict[str, int]]:
        """Return the request for what is missing, and the sample of each of its ids.

        `version` is that of the adapters to compute with.
        """
        missing = [sample for sample in range(len(self.seeds)) if self._completion(sample).finish_reason == UNFINISHED]
        named = {f"{self.slot}-{sample}-{next(ids)}": sample for sample in missing}
        begun = {
            request: Sampled(self.begun[sample].tokens.tolist(), self.begun[sample].logprobs.tolist())
            for request, sample in named.items()
            if sample in self.begun
        }
        asked = [(request, self.seeds[sample]) for request, sample in named.items()]
        tokens = self.prompt.tokens.tolist()
        return Submission(tokens, self.sampling, asked, self.reports_experts, version, begun, self.may_stop), named

    def add(self, sample: int, answer: Answer) -> int:
        """Take a finished completion; return the number of its tokens that were not known when it was submitted."""
        before = self._completion(sample)
        # The watch over prefix caches asks for what was cached of the prompt, and not of what was sampled behind it.
        cached = before.num_cached_tokens if sample in self.begun else answer.completion.num_cached_tokens
        self._made[sample] = replace(answer.completion, num_cached_tokens=cached, pieces=before.pieces)
        if answer.prompt_experts is not None:
            self._prompt_experts = answer.prompt_experts
        return len(answer.completion.tokens) - len(before.tokens)

    def note(self, sample: int, sampled: Sampled) -> int:
        """Take what is sampled so far of a completion; return the number of its tokens that were not known before."""
        before = self._completion(sample)
        tokens, logprobs = np.asarray(sampled.tokens, dtype=np.int32), np.asarray(sampled.logprobs, dtype=np.float32)
        self._made[sample] = replace(before, tokens=tokens, logprobs=logprobs, seed=self.seeds[sample])
        return len(tokens) - len(before.tokens)

    def group(self) -> Group:
        """Return the group; completions that are not finished have UNFINISHED as their reason to end."""
        completions = tuple(self._completion(sample) for sample in range(len(self.seeds)))
        return Group(self.slot, self.prompt, completions, self._prompt_experts)

    def _completion(self, sample: int) -> Completion:
        found = self._made.get(sample) or self.begun.get(sample)
        if found is not None:
            return found
        return Completion(np.empty(0, np.int32), np.empty(0, np.float32), "", UNFINISHED, self.seeds[sample])


def submissions(
    groups: Mapping[int, PendingGroup], slots: Iterable[int], ids: Iterator[int], version: int | None
) -> tuple[list[Submission], dict[str, tuple[int, int]]]:
    """Return the requests for what is missing of some groups, and the slot and sample of each request's id.

    `version` is that of the adapters to compute with.
    """
    made, places = [], dict[str, tuple[int, int]]()
    for slot in slots:
        submission, named = groups[slot].submission(ids, version)
        places.update({request: (slot, sample) for request, sample in named.items()})
        if named:
            made.append(submission)
    return made, places


def _next_seed(seed: int, weights_version: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{weights_version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def completion(sampling: Sampling, seed: int, *, begun: int = 0, in_steps: bool = False) -> Any:
    """Return the vllm.SamplingParams of one completion, whose result is tokens with their log-probs.

    `begun` of its tokens are sampled already. The result comes once, or with `in_steps` what every step has sampled.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens - begun,
        seed=seed,
        logprobs=0,  # log-probs of sampled tokens only
        detokenize=False,  # done once, at the end
        output_kind=RequestOutputKind.DELTA if in_steps else RequestOutputKind.FINAL_ONLY,
    )


def probe(prompt_logprobs: int | None = 0) -> Any:
    """Return the vllm.SamplingParams of a request for the log-probs of its prompt, and of the most likely tokens there.

    vLLM computes such a prompt and does not read it from its prefix cache, as it does with `prompt_logprobs` None.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,  # the least that vLLM takes
        prompt_logprobs=prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logits() -> Any:
    """Return the vllm.PoolingParams of a sequence that is classified: its logits as they are, without a sigmoid."""
    from vllm import PoolingParams

    return PoolingParams(task="classify", use_activation=False)
