"""The observer that records samples token by token, on every rank those of the groups that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Floats, Group
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.ops import hf_folder
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.sample_record import End, Numbers, RecordedGroup, RecordedSample
from gspo_hpc.training.observers.base import StepObserver, TrainedGroups

MB = 10**6  # bytes
_SPACE = "\u2581"  # stands for a space at the start of a word in vocabularies of SentencePiece
_BROKEN = "\ufffd"  # stands for bytes that are a part of a character
_END = 128  # bytes that are kept free for the line that says that the record is full


class SampleRecord(StepObserver):
    """The writer of this rank's file of the record; a step is recorded on all ranks, or on none.

    The record never exceeds `tracking.record_mb`: all ranks agree on the size that a step would bring it to.
    """

    def __init__(self, run: RunDir, config: Config, transport: Transport, note: Callable[[str], None]) -> None:
        """Go on with the record as it is on disk. Nobody writes to it while observers are made."""
        self._folder, self._transport, self._note = run.record, transport, note
        self._limit_mb = config.tracking.record_mb
        self._texts = TokenTexts(str(config.model.path))
        # Rank 0 counts what earlier attempts wrote, on whatever ranks.
        self._written = sample_record.size(self._folder) if transport.rank == 0 else 0
        ended = sample_record.end(self._folder) if transport.rank == 0 else None
        self._ended_before = ended is not None and ended.limit_mb == self._limit_mb
        self._full = False  # on all ranks at once

    def trained(self, what: TrainedGroups) -> None:
        """Append the groups of a step. Collective."""
        if self._full:
            return
        member = b""
        if what.groups:
            member = sample_record.packed([self._group(what, group) for group in what.groups])
        limit = int(self._limit_mb * MB)
        mine = self._written + len(member) + (limit if self._ended_before else 0)
        whole = self._transport.tree_all_reduce(str(mine).encode(), lambda parts: str(sum(map(int, parts))).encode())
        if int(whole) + _END > limit:
            self._finish(what.step)
            return
        if member:
            sample_record.append(sample_record.path_of(self._folder, self._transport.rank), member)
            self._written += len(member)

    def _finish(self, step: int) -> None:
        """Record nothing any more, and say so, once in the life of a run."""
        self._full = True
        if self._transport.rank == 0 and not self._ended_before:
            ended = sample_record.packed([End(step, self._limit_mb)])
            assert len(ended) <= _END, len(ended)
            sample_record.append(sample_record.path_of(self._folder, 0), ended)
            self._note(
                f"the record of samples is full (tracking.record_mb {self._limit_mb:g}): nothing is recorded from "
                f"step {step} on"
            )

    def _group(self, what: TrainedGroups, group: Group) -> RecordedGroup:
        samples = [
            self._sample(completion, index, what.weights_version, what.logprobs.get((group.slot, index)))
            for index, completion in enumerate(group.completions)
        ]
        prompt = group.prompt
        return RecordedGroup(
            step=what.step,
            rollout=what.rollout,
            update=what.update,
            slot=group.slot,
            prompt_index=prompt.index,
            prompt=prompt.text,
            prompt_length=len(prompt.tokens),
            fields=prompt.fields,
            samples=samples,
        )

    def _sample(self, c: Completion, index: int, version: int, logprobs: Floats | None) -> RecordedSample:
        ratios = None
        if logprobs is not None:  # without old ones the policy that was updated is the one that sampled
            difference = logprobs - (logprobs if c.old_logprobs is None else c.old_logprobs)
            with np.errstate(over="ignore", invalid="ignore"):  # in float64, which is the same on every processor
                ratios = np.exp(difference.astype(np.float64)).astype(np.float32)
        return RecordedSample(
            index=index,
            text=c.text,
            reward=c.reward,
            reward_parts=dict(c.reward_parts),
            outcomes=dict(c.outcomes),
            failure=c.failure,
            excluded=c.excluded,
            advantage=c.advantage,
            truncated=c.finish_reason == "length",
            weights_version=version,
            seed=c.seed,
            tokens=c.tokens.tolist(),
            token_texts=[self._texts[token] for token in c.tokens.tolist()],
            rollout_logprobs=_by_token(c, c.logprobs),
            old_logprobs=_by_token(c, c.old_logprobs),
            logprobs=_by_token(c, logprobs),
            reference_logprobs=_by_token(c, c.reference_logprobs),
            ratios=_by_token(c, ratios),
        )


def _by_token(c: Completion, values: Floats | None) -> Any:
    """Return values of sampled tokens with None in the place of each token of an environment; None for None."""
    if values is None or c.environment is None:
        return None if values is None else shortest(values)
    found = np.full(len(c.tokens), np.nan, np.float32)
    found[c.sampled] = values
    return shortest(found)


def shortest(values: Floats) -> Numbers:
    """Return numbers that are written with as few digits as tell them apart from other float32."""
    return [float(str(value)) if np.isfinite(value) else None for value in values.astype(np.float32)]


@dataclass
class TokenTexts:
    """The text of each token by itself; the tokenizer is loaded when it is first asked for one."""

    model_path: str
    _tokenizer: Any = None
    _known: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, token: int) -> str:
        """Return the text of a token, and of a part of a character its name in the vocabulary."""
        if token not in self._known:
            if self._tokenizer is None:
                self._tokenizer = hf_folder.tokenizer(self.model_path)
            self._known[token] = _text(self._tokenizer, token)
        return self._known[token]


def _text(tokenizer: Any, token: int) -> str:
    name = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str):  # vocabularies are padded for the sake of matrix products
        return ""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _BROKEN in text:
        return name
    return f" {text}" if name.startswith(_SPACE) and not text.startswith(" ") else text
