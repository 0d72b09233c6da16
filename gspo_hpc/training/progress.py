"""The progress of a run while it trains: the one thing that the loop changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.algorithms.terms.adaptive import AdaptiveWeights
from gspo_hpc.data.carried import Carried
from gspo_hpc.data.prompts import NO_RATES, NONE_RETIRED, Position, SourcePosition
from gspo_hpc.data.retired import PassRates, Retired
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.checkpoint_state import CheckpointState, SampledBy


@dataclass(frozen=True)
class Rollout:
    """A sampled and graded rollout."""

    groups: ShardedGroups  # with advantages
    after: Position  # of the next rollout's prompts, with those that this one retired
    engines: Mapping[str, float]  # metrics of all engines' work for it, and of dynamic sampling
    weights_version: int  # the number of steps that had made the weights which sampled it


@dataclass
class Progress:
    """The position of the run: at first what the newest whole checkpoint holds, or nothing."""

    cursor: Cursor = field(default_factory=Cursor)
    groups: ShardedGroups | None = None  # of a rollout that is not used up
    record: dict[str, Any] | None = None  # of the step that is done but not logged
    evaluated: bool = False  # the evaluation before the first step is logged
    engines: Mapping[str, float] = field(default_factory=dict)  # metrics of the newest rollout of this attempt
    baseline: Baseline = field(default_factory=Baseline)  # of the gaps between engine and trainer
    ahead: Mapping[int, SampledBy] = field(default_factory=dict)  # see CheckpointState
    weights: AdaptiveWeights | None = None  # of the objective, where they follow targets
    teacher: str | None = None  # the fingerprint of its weights
    retired: Retired = NONE_RETIRED  # prompts that the next rollout leaves out
    rates: PassRates = NO_RATES  # by which its prompts are drawn, where there is a curriculum
    sources: tuple[SourcePosition, ...] = ()  # where its prompts begin, of each of several sources
    carried: tuple[Carried, ...] = ()  # groups that the next rollout goes on with
    rollout_seconds: float | None = None  # before a rollout's first update; None if an earlier attempt generated it

    def __post_init__(self) -> None:
        self.saved_step = self.cursor.step  # of the newest checkpoint
        cursor, used = self.cursor, self.ahead.get(self.cursor.rollout)
        self._after = self.start
        # Of the weights that sampled the rollout in use, as Rollout has it.
        self.weights_version = cursor.step - cursor.update if used is None else used.version

    @property
    def start(self) -> Position:
        """The position of the next rollout's prompts."""
        return Position(self.cursor.epoch, self.cursor.offset, self.retired, self.rates, self.sources, self.carried)

    def begin_rollout(self, rollout: Rollout, groups: ShardedGroups, seconds: float) -> None:
        """Train on `groups`, those of the rollout with log-probs, from here on; they took `seconds`."""
        self.groups, self.engines, self._after = groups, rollout.engines, rollout.after
        self.rollout_seconds, self.weights_version = seconds, rollout.weights_version

    def advance(self, batch: ShardedGroups, result: StepResult | None, updates_per_rollout: int) -> Cursor:
        """Move to after one optimizer step on `batch`, and return the cursor before it.

        A rollout that is used up is let go of: with choices of experts it may have gigabytes, and the next one comes.
        """
        before = self.cursor
        self.cursor = before.stepped(
            updates_per_rollout,
            epoch=self._after.epoch,
            offset=self._after.offset,
            skipped=result is not None and result.skipped and not result.overflowed,
            tokens=int(batch.table.rows["sampled_len"].sum()),
        )
        self.retired, self.rates, self.sources = self._after.retired, self._after.rates, self._after.parts
        self.carried = self._after.carried
        if self.cursor.update == 0:
            self.groups = None
        return before

    def objective(self, fixed: Objective) -> Objective:
        """Return the objective of the next step: the fixed one, with weights that follow their targets."""
        return fixed if self.weights is None else self.weights.of(fixed)

    def adapt(self, fixed: Objective, result: StepResult | None) -> None:
        """Have the weights follow their targets after an optimizer step; one that changed nothing leaves them."""
        if self.weights is not None and result is not None and not result.skipped:
            self.weights = self.weights.after(fixed, result.sums)

    def checkpoint_state(self, ahead: Mapping[int, SampledBy]) -> CheckpointState:
        """Return what a checkpoint of this moment holds besides the policy's state; `ahead`: see CheckpointState."""
        unused = self.groups if self.cursor.update else None
        groups = list(unused.own.values()) if unused is not None else []
        return CheckpointState(
            self.cursor,
            groups,
            self.record,
            replace(self.baseline),
            ahead,
            self.weights,
            self.teacher,
            self.retired,
            self.rates,
            self.sources,
            self.carried,
        )
