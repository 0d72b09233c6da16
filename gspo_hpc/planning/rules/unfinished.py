"""Rules of rollouts that end before all that they draw is finished."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import auto
from fractions import Fraction

from gspo_hpc.config.derived import router_replay
from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class UnfinishedRule(RuleId):
    """Names of the rules in this file."""

    UNFINISHED_NEEDS_OVERSAMPLING = auto()
    CONTINUED_WITHOUT_ENVIRONMENT = auto()
    CONTINUED_WITHOUT_CHOICES = auto()
    CONTINUED_WITHOUT_ENTROPIES = auto()


@rule(
    UnfinishedRule.UNFINISHED_NEEDS_OVERSAMPLING,
    "`rollout.unfinished` other than wait needs a `rollout.oversampling_factor` with which more prompts are drawn",
    Topic.ENGINES,
)
def _more(plan: PlanBuilder) -> Iterator[str]:
    """A rollout that draws no more than it trains on has to wait for all of it."""
    rollout, prompts = plan.config.rollout, plan.quantities.get("num_rollout_prompts")
    if rollout.unfinished == "wait" or prompts is None or prompts.denominator != 1:
        return
    drawn = math.ceil(prompts * Fraction(str(rollout.oversampling_factor)))
    if drawn <= prompts:
        least = math.ceil(100 * Fraction(int(prompts) + 1, int(prompts)) - 100) / 100
        yield (
            f"rollout.unfinished {rollout.unfinished} ends a rollout with the first {show(prompts)} groups of all that "
            f"it draws, and with rollout.oversampling_factor {rollout.oversampling_factor:g} it draws no more: give "
            f"{max(1.25, 1 + least):g}, or rollout.unfinished=wait"
        )


@rule(
    UnfinishedRule.CONTINUED_WITHOUT_ENVIRONMENT,
    "conversations are not continued: no `rollout.unfinished: continue` with an environment or tools",
    Topic.ENGINES,
)
def _environment(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if config.rollout.unfinished == "continue" and config.environment.talks:
        what = f"name ({config.environment.name})" if config.environment.name else "tools"
        yield (
            f"rollout.unfinished continue and environment.{what} exclude each other: a conversation is not carried "
            "into the next rollout yet; give rollout.unfinished=drop, or wait"
        )


@rule(
    UnfinishedRule.CONTINUED_WITHOUT_CHOICES,
    "`rollout.unfinished: continue` needs `moe.router_replay: off` in a mixture",
    Topic.ENGINES,
)
def _choices(plan: PlanBuilder) -> Iterator[str]:
    """Several weights chose a completion's experts, and engines report those of the last alone."""
    config = plan.config
    if config.rollout.unfinished == "continue" and plan.model_file.experts and router_replay(config) != "off":
        yield (
            f"moe.router_replay {config.moe.router_replay} repeats the experts that one pass chose, and with "
            "rollout.unfinished continue several weights choose those of a completion: give moe.router_replay=off, or "
            "rollout.unfinished=drop"
        )


@rule(
    UnfinishedRule.CONTINUED_WITHOUT_ENTROPIES,
    "`algorithm.top_entropy_quantile` below 1 needs another `rollout.unfinished` than continue",
    Topic.ENGINES,
)
def _entropies(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if config.rollout.unfinished == "continue" and config.algorithm.top_entropy_quantile < 1:
        yield (
            f"algorithm.top_entropy_quantile ({config.algorithm.top_entropy_quantile:g}) needs entropies under the "
            "weights that sampled, which are gone with rollout.unfinished continue: set rollout.unfinished=drop, or "
            "top_entropy_quantile 1"
        )
