"""Rules of the objective: algorithms/objective.py knows what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.algorithms import objective
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class ObjectiveRule(RuleId):
    """Names of the rules in this file."""

    OBJECTIVE_CONSISTENT = auto()


@rule(
    ObjectiveRule.OBJECTIVE_CONSISTENT,
    "the settings of the objective do not contradict each other",
    Topic.OBJECTIVE,
    estimable=True,
)
def _consistent(plan: PlanBuilder) -> Iterator[str]:
    try:
        objective.resolve(plan.config.algorithm)
    except ValueError as error:
        yield from str(error).splitlines()
