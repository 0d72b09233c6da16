"""Rules of batch sizes: rollouts and updates are made of whole groups, and every rank gets its share of them.

All counts are completions unless a name says prompts. With a token budget packing decides the micro-batches, so the
rules about filling them do not apply. With GPUs set apart for generation (server mode) prompts belong to no DP group.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto
from fractions import Fraction

from gspo_hpc.config.derived import rewards_count
from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class BatchRule(RuleId):
    """Names of the rules in this file."""

    ROLLOUT_GROUPS_WHOLE = auto()
    ROLLOUT_PROMPTS_DIVIDE_OVER_DP = auto()
    ROLLOUT_PROMPTS_REACH_EVERY_DP_GROUP = auto()
    ROLLOUT_PROMPTS_FILL_MICRO_BATCHES = auto()
    UPDATE_PROMPTS_REACH_EVERY_DP_GROUP = auto()
    UPDATE_PROMPTS_FILL_MICRO_BATCHES = auto()
    ROLLOUT_UPDATES_WHOLE = auto()
    GROUP_HAS_TWO_COMPLETIONS = auto()
    ROLLOUT_REACHES_EVERY_GPU = auto()
    UPDATE_FILLS_MICRO_BATCHES = auto()
    UPDATE_REACHES_EVERY_DP_RANK = auto()
    GENERATION_BATCH_SIZE_AGREES = auto()
    UPDATE_GROUPS_WHOLE = auto()
    ONE_SIZE_PER_PASS = auto()
    TOKEN_BUDGET_HOLDS_LONGEST_SEQUENCE = auto()


@rule(
    BatchRule.ROLLOUT_GROUPS_WHOLE,
    "`generation_batch_size` is divisible by `num_generations`",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_groups(plan: PlanBuilder) -> Iterator[str]:
    gen, group = plan.quantities.get("generation_batch_size"), plan.config.batch.num_generations
    if gen and group and gen % group:
        yield f"generation_batch_size ({gen}) must be divisible by num_generations ({group})"


def _rollout_prompts(plan: PlanBuilder) -> str:
    """Return the prompts of a rollout, and how they come about, in the words that users search for."""
    q = plan.quantities
    made = f"generation_batch_size ({q['generation_batch_size']}) // num_generations ({q['num_generations']})"
    return f"num_rollout_prompt ({show(q['num_rollout_prompts'])}) = {made}"


@rule(
    BatchRule.ROLLOUT_PROMPTS_DIVIDE_OVER_DP,
    "`num_rollout_prompts` is divisible by `dp_size`",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_prompts_divide(plan: PlanBuilder) -> Iterator[str]:
    per_group, prompts = (
        plan.quantities.get("num_rollout_prompts_per_dp_group"),
        plan.quantities.get("num_rollout_prompts"),
    )
    if per_group is not None and prompts is not None and prompts.denominator == 1 != per_group.denominator:
        yield f"{_rollout_prompts(plan)} must be divisible by dp_size ({plan.dp})"


@rule(
    BatchRule.ROLLOUT_PROMPTS_REACH_EVERY_DP_GROUP,
    "every DP group has at least one prompt of a rollout",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_prompts_reach(plan: PlanBuilder) -> Iterator[str]:
    per_group = plan.quantities.get("num_rollout_prompts_per_dp_group")
    if per_group is not None and per_group < 1:
        whole = per_group.numerator // per_group.denominator
        yield (
            f"per_device_num_rollout_prompt ({whole}) must be at least 1: {_rollout_prompts(plan)} over dp_size "
            f"({plan.dp})"
        )


@rule(
    BatchRule.ROLLOUT_PROMPTS_FILL_MICRO_BATCHES,
    "`num_rollout_prompts_per_dp_group` is divisible by `micro_batch_size`",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_prompts_fill(plan: PlanBuilder) -> Iterator[str]:
    per_group = plan.quantities.get("num_rollout_prompts_per_dp_group")
    mbs = plan.config.batch.micro_batch_size
    if per_group is not None and mbs and per_group % mbs:
        yield f"Per-device rollout prompt count ({show(per_group)}) must be divisible by micro_batch_size ({mbs})"


def _update_prompts(plan: PlanBuilder, must: str) -> str:
    """Return a message: what the prompts of an update must be, and how their number comes about."""
    batch, q = plan.config.batch, plan.quantities
    gbs, group, mbs, dp = batch.global_batch_size, batch.num_generations, batch.micro_batch_size, plan.dp
    assert group and mbs and dp
    return (
        f"num_prompts_per_dp_group ({show(q['num_prompts_per_dp_group'])}) must {must}: global_batch_size ({gbs}) / "
        f"num_generations ({group}) / dp_size ({dp}); steps_per_generation does not matter here; "
        f"global_batch_size must be a multiple of {group * dp * mbs}"
    )


@rule(
    BatchRule.UPDATE_PROMPTS_REACH_EVERY_DP_GROUP,
    "every DP group has at least one prompt of an update",
    Topic.COUNTS,
    estimable=True,
)
def _update_prompts_reach(plan: PlanBuilder) -> Iterator[str]:
    per_group = plan.quantities.get("num_prompts_per_dp_group")
    if per_group is not None and plan.config.batch.micro_batch_size and per_group < 1:
        yield _update_prompts(plan, "be at least 1")


@rule(
    BatchRule.UPDATE_PROMPTS_FILL_MICRO_BATCHES,
    "`num_prompts_per_dp_group` is divisible by `micro_batch_size`",
    Topic.COUNTS,
    estimable=True,
)
def _update_prompts_fill(plan: PlanBuilder) -> Iterator[str]:
    per_group = plan.quantities.get("num_prompts_per_dp_group")
    mbs = plan.config.batch.micro_batch_size
    if per_group is not None and mbs and per_group >= 1 and per_group % mbs:  # below 1, the rule above says so
        yield _update_prompts(plan, f"be divisible by micro_batch_size ({mbs})")


@rule(
    BatchRule.ROLLOUT_UPDATES_WHOLE,
    "`generation_batch_size` is divisible by `global_batch_size`",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_updates(plan: PlanBuilder) -> Iterator[str]:
    gen, gbs = plan.quantities.get("generation_batch_size"), plan.config.batch.global_batch_size
    if gen and gbs and gen % gbs:
        yield f"generation_batch_size ({gen}) must be divisible by global_batch_size ({gbs})"


@rule(
    BatchRule.GROUP_HAS_TWO_COMPLETIONS,
    "`num_generations` is at least 2, unless a teacher alone teaches",
    Topic.COUNTS,
    estimable=True,
)
def _group(plan: PlanBuilder) -> Iterator[str]:
    group = plan.config.batch.num_generations
    if group and group < 2 and rewards_count(plan.config):
        yield f"num_generations ({group}) must be at least 2: one completion has no group to compare with"


@rule(
    BatchRule.ROLLOUT_REACHES_EVERY_GPU,
    "`generation_batch_size` is at least `world_size`",
    Topic.COUNTS,
    estimable=True,
)
def _rollout_reaches(plan: PlanBuilder) -> Iterator[str]:
    gen, world = plan.quantities.get("generation_batch_size"), plan.world
    if gen and world and gen < world:
        yield (
            f"per_device_generation_batch_size ({show(Fraction(gen, world))}) = generation_batch_size ({gen}) / "
            f"world_size ({world}) must be at least 1"
        )


@rule(
    BatchRule.UPDATE_FILLS_MICRO_BATCHES,
    "`global_batch_size` is divisible by `micro_batch_size` x `dp_size`",
    Topic.COUNTS,
)
def _update_fills(plan: PlanBuilder) -> Iterator[str]:
    gbs, mbs, dp = plan.config.batch.global_batch_size, plan.config.batch.micro_batch_size, plan.dp
    if gbs and mbs and dp and gbs % (mbs * dp):
        yield f"global_batch_size ({gbs}) must be divisible by micro_batch_size ({mbs}) x dp_size ({dp}) = {mbs * dp}"


@rule(
    BatchRule.UPDATE_REACHES_EVERY_DP_RANK,
    "with a token budget, `global_batch_size` is at least `dp_size`",
    Topic.COUNTS,
)
def _update_reaches(plan: PlanBuilder) -> Iterator[str]:
    batch, dp = plan.config.batch, plan.dp
    gbs = batch.global_batch_size
    if gbs and dp and batch.micro_batch_tokens and not batch.micro_batch_size and gbs < dp:
        yield f"global_batch_size ({gbs}) must be at least dp_size ({dp}): a DP rank would have nothing to learn from"


@rule(
    BatchRule.GENERATION_BATCH_SIZE_AGREES,
    "`generation_batch_size` and `steps_per_generation` agree if both are given",
    Topic.COUNTS,
    estimable=True,
)
def _agree(plan: PlanBuilder) -> Iterator[str]:
    batch = plan.config.batch
    gbs, gen, spg = batch.global_batch_size, batch.generation_batch_size, batch.steps_per_generation
    if gbs and gen and spg and gen != gbs * spg:
        yield (
            f"generation_batch_size ({gen}) and steps_per_generation ({spg}) disagree: global_batch_size ({gbs}) x "
            f"steps_per_generation ({spg}) = {gbs * spg}; give one of them"
        )


@rule(
    BatchRule.UPDATE_GROUPS_WHOLE,
    "`global_batch_size` is divisible by `num_generations`",
    Topic.COUNTS,
    estimable=True,
)
def _update_groups(plan: PlanBuilder) -> Iterator[str]:
    gbs, group, dp = plan.config.batch.global_batch_size, plan.config.batch.num_generations, plan.dp
    if gbs and group and gbs % group:
        made = f"{dp} x {gbs // dp}" if dp and gbs % dp == 0 else f"{gbs}"
        yield (
            f"The global train batch size ({made}) must be evenly divisible by the number of generations per prompt "
            f"({group}): every update is made of whole groups"
        )


_PASSES = ("", "logprob_", "reference_")  # prefixes of the sizes of a pass


@rule(BatchRule.ONE_SIZE_PER_PASS, "a pass has a micro-batch size or a token budget, not both", Topic.SEQUENCES)
def _one_size(plan: PlanBuilder) -> Iterator[str]:
    for prefix in _PASSES:
        size = getattr(plan.config.batch, f"{prefix}micro_batch_size")
        tokens = getattr(plan.config.batch, f"{prefix}micro_batch_tokens")
        if size and tokens:
            text = f"{prefix}micro_batch_size ({size}) and {prefix}micro_batch_tokens ({tokens}) exclude each other"
            yield f"{text}; give one"


@rule(
    BatchRule.TOKEN_BUDGET_HOLDS_LONGEST_SEQUENCE,
    "a token budget holds `max_prompt_length` + `max_response_length` tokens",
    Topic.SEQUENCES,
)
def _budget(plan: PlanBuilder) -> Iterator[str]:
    for prefix in _PASSES:
        tokens = getattr(plan.config.batch, f"{prefix}micro_batch_tokens")
        if tokens is not None and tokens < plan.longest_sequence:
            text = f"{prefix}micro_batch_tokens ({tokens}) must hold the longest sequence"
            yield f"{text}: {plan.longest_sequence_made} tokens"
