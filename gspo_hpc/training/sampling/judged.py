"""Advantages and signal of a group, which follow from its own rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gspo_hpc.algorithms.objective import Objective, resolve
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.data.table import GroupTable
from gspo_hpc.rewards.registry import part_names, source_weights
from gspo_hpc.training import update


def judged_groups(own: Iterable[Group], config: Config, objective: Objective) -> list[Group]:
    """Return graded groups in the order of their slots, with advantages within each."""
    graded = update.without_truncated([*own], config)
    names = part_names(config.reward)
    made = list[Group]()
    for source in (None, *config.data.sources):
        weights = {names[term]: weight for term, weight in source_weights(config.reward, source).items()}
        of_source = [group for group in graded if find_source(group.prompt.fields, config.data) is source]
        made += update.with_advantages(of_source, objective.normalize_advantage, objective.advantage, weights)
    return sorted(made, key=lambda group: group.slot)


def signal_of(config: Config) -> Callable[[Group], bool]:
    """Return a function that tells of a graded group whether there is anything to learn from it."""
    objective = resolve(config.algorithm)

    def has_signal(group: Group) -> bool:
        table = GroupTable.of(judged_groups([group], config, objective), 0)
        return update.signals(table, config)[group.slot]

    return has_signal
