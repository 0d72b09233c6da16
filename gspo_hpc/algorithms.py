"""Which objective a run optimises: the presets, and what contradicts or defeats them.

``gspo`` is the objective of the GSPO paper (arXiv 2507.18071): one ratio per sequence, the exponential of the mean
difference of log-probs, clipped to [1 - 3e-4, 1 + 4e-4], and a plain mean over sequences. ``gspo_token`` has the same
value but gives every token its own gradient. ``grpo`` has one ratio per token, clipped at 0.2, averaged over the tokens
of a sequence and then over sequences. The formulas themselves are in loss.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gspo_hpc.config import Aggregation, Algorithm, Batch, Config

Ratio = Literal["sequence", "sequence_token", "token"]


@dataclass(frozen=True)
class Objective:
    """A resolved objective: nothing is left to defaults."""

    ratio: Ratio  # one per sequence; the same with a gradient per token; one per token
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    aggregation: Aggregation  # mean over sequences (of means over their tokens), or over all tokens of the batch
    normalize_advantage: bool  # divide by the group's standard deviation
    kl_beta: float  # weight of the KL term against the reference model


PRESETS: dict[str, Objective] = {
    "gspo": Objective("sequence", 3e-4, 4e-4, "sequence", True, 0.0),
    "gspo_token": Objective("sequence_token", 3e-4, 4e-4, "sequence", True, 0.0),
    "grpo": Objective("token", 0.2, 0.2, "sequence", True, 0.0),
}


def resolve(algorithm: Algorithm) -> Objective:
    """The preset `algorithm.name` with the other keys over it. Raises ValueError, with every contradiction in it."""
    preset = PRESETS[algorithm.name]
    objective = Objective(
        ratio=preset.ratio,
        clip_low=preset.clip_low if algorithm.clip_low is None else algorithm.clip_low,
        clip_high=preset.clip_high if algorithm.clip_high is None else algorithm.clip_high,
        aggregation=algorithm.aggregation or preset.aggregation,
        normalize_advantage=algorithm.normalize_advantage,
        kl_beta=algorithm.kl_beta,
    )
    wrong: list[str] = []
    if objective.aggregation == "token" and objective.ratio != "token":
        wrong.append(
            f"algorithm.aggregation token contradicts algorithm.name {algorithm.name}: its ratio belongs to a whole "
            "sequence, and a mean over all tokens would weigh sequences by their length; use aggregation sequence, "
            "or name grpo"
        )
    if not 0 < objective.clip_low < 1:
        wrong.append(
            f"algorithm.clip_low ({objective.clip_low}) must be above 0 and below 1: ratios are positive, so at 1 - "
            f"clip_low <= 0 nothing is clipped; the preset {algorithm.name} has {preset.clip_low}"
        )
    if not 0 < objective.clip_high < math.inf:
        wrong.append(
            f"algorithm.clip_high ({objective.clip_high}) must be above 0; the preset {algorithm.name} has "
            f"{preset.clip_high}"
        )
    if not 0 <= objective.kl_beta < math.inf:
        wrong.append(
            f"algorithm.kl_beta ({objective.kl_beta}) must be 0 or more: a negative weight would drive the policy away "
            "from the reference; 0 means no reference at all"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    return objective


def updates_per_rollout(batch: Batch) -> int:
    """Optimizer steps made from one rollout: steps_per_generation x num_iterations, from whichever keys are given.

    With 1, the policy that is updated is the one that sampled: every ratio is 1.
    """
    steps = batch.steps_per_generation or 1
    if batch.generation_batch_size is not None and batch.global_batch_size is not None:
        steps = max(1, math.ceil(batch.generation_batch_size / batch.global_batch_size))
    return steps * batch.num_iterations


def warnings(config: Config) -> list[str]:
    """Settings that are allowed but defeat the objective, one line each. Raises ValueError as :func:`resolve` does."""
    objective = resolve(config.algorithm)
    found: list[str] = []
    if updates_per_rollout(config.batch) == 1:
        found.append(
            "clipping is inert: one update per rollout (steps_per_generation 1, num_iterations 1) leaves every ratio "
            "at 1; the GSPO paper makes 4 (batch.steps_per_generation: 4)"
        )
    widest, narrowest = max(objective.clip_low, objective.clip_high), min(objective.clip_low, objective.clip_high)
    if objective.ratio != "token" and widest >= 0.05:
        found.append(
            f"a clip range of {widest:g} is made for ratios of single tokens (GRPO): the ratio of a sequence is a mean "
            f"over its tokens and hardly ever gets there; {config.algorithm.name} has "
            f"{PRESETS[config.algorithm.name].clip_low:g}/{PRESETS[config.algorithm.name].clip_high:g}"
        )
    if objective.ratio == "token" and narrowest < 0.01:
        found.append(
            f"a clip range of {narrowest:g} is made for ratios of whole sequences (GSPO): with one ratio per token it "
            "clips nearly everything; grpo has 0.2/0.2"
        )
    return found
