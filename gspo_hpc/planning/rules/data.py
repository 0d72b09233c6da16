"""Rules of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule


class DataRule(RuleId):
    """Names of the rules in this file."""

    DATA_FILLS_ROLLOUT = auto()


@rule(DataRule.DATA_FILLS_ROLLOUT, "the training data has prompts for at least one rollout")
def _rows(plan: PlanBuilder) -> Iterator[str]:
    prompts = plan.quantities.get("num_rollout_prompts")
    if plan.rows is not None and prompts is not None and plan.rows < prompts:
        yield (
            f"the training data has {plan.rows} prompts, but one rollout needs num_rollout_prompts ({show(prompts)})"
        )
