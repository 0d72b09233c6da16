"""Rules of the objective: algorithms/objective.py knows what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.algorithms import objective
from gspo_hpc.config.derived import samples_part_of_distribution
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class ObjectiveRule(RuleId):
    """Names of the rules in this file."""

    OBJECTIVE_CONSISTENT = auto()
    LOGPROBS_COMPARABLE = auto()


@rule(
    ObjectiveRule.OBJECTIVE_CONSISTENT,
    "the settings of the objective do not contradict each other",
    Topic.OBJECTIVE,
    estimable=True,
)
def _consistent(plan: PlanBuilder) -> Iterator[str]:
    if not objective.is_known(plan.config.algorithm):
        return  # the config of a run, whose settings were checked before it was started
    try:
        objective.resolve(plan.config.algorithm)
    except ValueError as error:
        yield from str(error).splitlines()


@rule(
    ObjectiveRule.LOGPROBS_COMPARABLE,
    "`temperature` is 1 where `top_p` or `top_k` leave tokens out",
    Topic.OBJECTIVE,
    estimable=True,
)
def _comparable(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    if samples_part_of_distribution(rollout) and rollout.temperature != 1.0:
        yield (
            f"rollout.temperature ({rollout.temperature:g}) must be 1 with rollout.top_p ({rollout.top_p:g}) and "
            f"rollout.top_k ({rollout.top_k}): vLLM reports log-probs of the whole distribution, which the trainer "
            "computes, only at temperature 1"
        )
