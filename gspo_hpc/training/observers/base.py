"""Observers of a run: they get its results, and change nothing of it.

Rank 0 has all of them. The other ranks have those that look at what each rank or node has for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.data.records import Floats, Group
from gspo_hpc.data.retired import Retirement
from gspo_hpc.exchange.exchange import Key, RolloutView
from gspo_hpc.rollout.generation import ProgressCallback, ignore_progress
from gspo_hpc.system.files import Entry
from gspo_hpc.training.checkpoint_state import CheckpointState


@dataclass(frozen=True)
class TrainedGroups:
    """The recorded groups of a step that this rank holds, which may be none."""

    step: int
    rollout: int
    update: int  # within the rollout
    weights_version: int  # steps that had made the weights that sampled the groups
    groups: Sequence[Group]
    logprobs: Mapping[Key, Floats]  # of the policy that the step updated, where the step computed them


class StepObserver:
    """An observer of which every method does nothing: a subclass has those that it is for."""

    def rollout(self, number: int, completions: int) -> contextlib.AbstractContextManager[ProgressCallback]:
        """Return a block around a rollout, which yields the function to call with its progress."""
        return contextlib.nullcontext(ignore_progress)

    def step(self, record: dict[str, Any]) -> None:
        """Take the record of one step, or of an evaluation before the first."""

    def samples(self, step: int, phase: str, shown: RolloutView) -> None:
        """Take what is shown of a rollout or of an evaluation."""

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the completions of an evaluation, a row for each prompt."""

    def retired(self, step: int, epoch: int, prompts: Sequence[tuple[Retirement, int]]) -> None:
        """Take the prompts that a rollout retired, each with its row in the data; `step` is its first."""

    def experts(self, step: int, tokens: Mapping[int, Sequence[int]]) -> None:
        """Take the tokens of each expert in the update of a step, by layer."""

    def trained(self, what: TrainedGroups) -> None:
        """Take the recorded groups of a step after its update. Every rank is told of its own, and all at once."""

    def note(self, text: str) -> None:
        """Take one line for the person who watches."""

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Take the table of a profiled step; `traces` is the folder with the traces of all ranks."""

    def checkpoint(self, staging: Path, known: Mapping[str, Entry], state: CheckpointState) -> None:
        """Take a checkpoint whose shards are written, in the thread that saves."""


class Observers(StepObserver):
    """Several observers as one, called in their order."""

    def __init__(self, observers: Sequence[StepObserver] = ()) -> None:
        self._observers = tuple(observers)

    @contextlib.contextmanager
    def rollout(self, number: int, completions: int) -> Iterator[ProgressCallback]:
        """Yield a function that gives the progress to all observers."""
        with contextlib.ExitStack() as stack:
            callbacks = [stack.enter_context(one.rollout(number, completions)) for one in self._observers]

            def progress(finished: int, tokens: int) -> None:
                for callback in callbacks:
                    callback(finished, tokens)

            yield progress

    def step(self, record: dict[str, Any]) -> None:
        """Give the record to all observers."""
        for one in self._observers:
            one.step(record)

    def samples(self, step: int, phase: str, shown: RolloutView) -> None:
        """Give the completions to all observers."""
        for one in self._observers:
            one.samples(step, phase, shown)

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give the rows to all observers."""
        for one in self._observers:
            one.evaluated(step, rows)

    def retired(self, step: int, epoch: int, prompts: Sequence[tuple[Retirement, int]]) -> None:
        """Give the prompts to all observers."""
        for one in self._observers:
            one.retired(step, epoch, prompts)

    def experts(self, step: int, tokens: Mapping[int, Sequence[int]]) -> None:
        """Give the tokens of each expert to all observers."""
        for one in self._observers:
            one.experts(step, tokens)

    def trained(self, what: TrainedGroups) -> None:
        """Give the groups to all observers."""
        for one in self._observers:
            one.trained(what)

    def note(self, text: str) -> None:
        """Give the line to all observers."""
        for one in self._observers:
            one.note(text)

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Give the table to all observers."""
        for one in self._observers:
            one.profile(step, table, traces)

    def checkpoint(self, staging: Path, known: Mapping[str, Entry], state: CheckpointState) -> None:
        """Give the checkpoint to all observers."""
        for one in self._observers:
            one.checkpoint(staging, known, state)
