"""Advantages and signal of a group, which follow from its own rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gspo_hpc.algorithms.objective import Objective, resolve
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.data.table import GroupTable
from gspo_hpc.rewards.registry import part_names
from gspo_hpc.training import update


def judged_groups(own: Iterable[Group], config: Config, objective: Objective) -> list[Group]:
    """Return graded groups in the order of their slots, with advantages within each."""
    graded = update.without_truncated(sorted(own, key=lambda group: group.slot), config)
    weights = {name: term.weight for name, term in zip(part_names(config.reward), config.reward.functions, strict=True)}
    return update.with_advantages(graded, objective.normalize_advantage, objective.advantage, weights)


def signal_of(config: Config) -> Callable[[Group], bool]:
    """Return a function that tells of a graded group whether there is anything to learn from it."""
    objective = resolve(config.algorithm)

    def has_signal(group: Group) -> bool:
        table = GroupTable.of(judged_groups([group], config, objective), 0)
        return update.signals(table, config)[group.slot]

    return has_signal
