"""The fixed parts of an attempt: the configuration and what follows from it, and the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.config.derived import Passes, several_weights_sample
from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import Position, PromptStream
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.retired import Retired
from gspo_hpc.data.sources.stream import MixedStream
from gspo_hpc.data.table import GroupTable


@dataclass(frozen=True)
class Recipe:
    """The configuration of an attempt, and what follows from it."""

    config: Config
    objective: Objective
    passes: Passes
    num_rollout_prompts: int
    updates_per_rollout: int
    attempt: int  # its number

    @property
    def max_steps(self) -> int:
        """The step at which the run ends."""
        assert self.config.run.max_steps is not None
        return self.config.run.max_steps

    @property
    def num_rollouts(self) -> int:
        """The rollouts of the whole run."""
        return -(-self.max_steps // self.updates_per_rollout)

    @property
    def samples_at_once(self) -> bool:
        """True if one version of the weights samples all of a rollout."""
        return not several_weights_sample(self.config)

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint follows the step."""
        return step % self.config.checkpoint.interval == 0 or step == self.max_steps

    def evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation follows the step."""
        options = self.config.eval
        return (options.after and step == self.max_steps) or (
            options.interval is not None and step % options.interval == 0
        )

    def recorded_slots(self, step: int, table: GroupTable) -> list[int]:
        """Return the slots of the step's groups that are recorded token by token; most steps have none.

        Groups that have an advantage come first: the update computes nothing of the others.
        """
        options = self.config.tracking
        interval = options.record_interval
        if interval is None or (step != 1 and step % interval):
            return []
        moving = table.select(table.rows["advantage"] != 0.0).slots
        found = dict.fromkeys([*moving, *table.slots])
        return [*found][: options.record_groups]


@dataclass(frozen=True)
class PromptData:
    """The prompts of training, in the order of their stream, and the unseen ones of evaluations."""

    stream: PromptStream | MixedStream
    train: Sequence[Prompt]  # on rank 0; empty elsewhere
    unseen: Sequence[Prompt]  # on rank 0; empty elsewhere
    unseen_sizes: Mapping[str, int]  # by evaluation set, in their order

    @property
    def unseen_count(self) -> int:
        """The number of unseen prompts."""
        return sum(self.unseen_sizes.values())

    def left(self, retired: Retired) -> int:
        """Return the number of training prompts that are not retired."""
        return self.stream.left(retired)

    def places(self, start: Position, count: int) -> tuple[list[int], Position]:
        """Return the places of a rollout's prompts in the list of all, by slot, and where the next rollout's begin.

        The groups that are carried from rollouts before come first; no group is carried to the next one here.
        """
        carried = [one.prompt for one in start.carried]
        more, after = self.stream.take(start, count - len(carried))
        return carried + more, after

    def take(self, start: Position, count: int) -> tuple[dict[int, Prompt], Position]:
        """Return the prompts of a rollout by slot, and where the next rollout's begin.

        Slots are 0 .. `count` - 1. Ranks other than 0 have no prompts here.
        """
        places, after = self.places(start, count)
        return dict(enumerate(self.train[place] for place in places)) if self.train else {}, after
