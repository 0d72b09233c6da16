"""The keys that every algorithm has. An algorithm itself is one file in gspo_hpc/algorithms/ (see plugins.py)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from gspo_hpc.config.section import CountFrom0, Number, Positive, Section, Share, key

Ratio = Literal["sequence", "sequence_token", "token"]
TrustRegion = Literal["clip", "weight", "mask", "gate", "geometric"]
Aggregation = Literal["sequence", "token", "prompt", "fixed_length"]
Advantage = Literal["group", "leave_one_out", "batch_std", "reinforce_baseline", "maxrl", "gdpo"]
Correction = Literal["none", "truncated", "masked", "rejection", "bypass"]
KlPlacement = Literal["loss", "reward"]
KlEstimator = Literal["k1", "k2", "k3", "absolute", "unbiased"]

_CLIPPED = (
    "The ratio is clipped to [1 - clip_low, 1 + clip_high]. With trust_region weight these bound weights, with mask "
    "changes of a probability, with geometric log-ratios."
)
_LOW = "must be above 0 and below 1: ratios are positive, so at 1 - clip_low <= 0 nothing is clipped"
_BETA = (
    "must be 0 or more: a negative weight would drive the policy away from the reference; 0 means no reference at all"
)
# Types with their ranges and meanings: a file that gives another default writes `clip_low: ClipLow = 0.2`.
ClipLow = Annotated[
    float,
    Field(gt=0, lt=1, allow_inf_nan=False, description=_CLIPPED, json_schema_extra={"errorMessage": _LOW}),
]
ClipHigh = Annotated[float, Field(gt=0, allow_inf_nan=False, description=_CLIPPED)]
RatioOf = Annotated[
    Ratio,
    Field(
        description="What has an importance ratio: every sequence, every token, or every token with the value of its "
        "sequence (sequence_token)."
    ),
]
TrustRegionOf = Annotated[
    TrustRegion,
    Field(
        description="What limits a step: clipping (clip), a bounded weight without gradient (weight), dropping tokens "
        "whose probability changed (mask), a smooth gate (gate), a mean of clipped log-ratios (geometric)."
    ),
]
AggregationOf = Annotated[
    Aggregation,
    Field(
        description="The mean that the loss takes: over sequences of their means (sequence), over all tokens of the "
        "batch (token), over prompts of their means (prompt), or the sum over a fixed length (fixed_length)."
    ),
]
AdvantageOf = Annotated[
    Advantage,
    Field(
        description="Reward minus the mean of its group (group) or of the others (leave_one_out); divided by the "
        "deviation in the rollout (batch_std, reinforce_baseline) or the mean (maxrl); by reward function (gdpo)."
    ),
]
NormalizeAdvantage = Annotated[
    bool, Field(description="Divide advantages by the standard deviation of their group (group, leave_one_out).")
]
CorrectionOf = Annotated[
    Correction,
    Field(
        description="Correction of the gap between engine and trainer: bounded weights of tokens (truncated, masked), "
        "dropped sequences (rejection), or the engine's log-probs as old ones, which saves their pass (bypass)."
    ),
]
KlBeta = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="Weight of the KL term against the reference model; with 0 there is no reference model.",
        json_schema_extra={"errorMessage": _BETA},
    ),
]

# Defaults that follow from a setting, unless they are given themselves: they are written out like all others.
_FOLLOWING: dict[str, dict[str, dict[str, Any]]] = {
    "advantage": {
        name: {"normalize_advantage": False}
        for name in ("leave_one_out", "batch_std", "reinforce_baseline", "maxrl", "gdpo")
    },
    "correction": {
        "truncated": {"correction_high": 2.0},
        "masked": {"correction_low": 0.5, "correction_high": 5.0},
        "rejection": {"correction_low": 0.99, "correction_high": 1.01},
    },
}


class AlgorithmSettings(Section):
    """The objective of a run: `name` picks the algorithm, the other keys change its settings."""

    paper: ClassVar[str] = "without a reference"  # what `plan` prints

    name: str = key(..., "The algorithm: a file in gspo_hpc/algorithms/, or path/to/file.py:Class.")
    clip_low: ClipLow
    clip_high: ClipHigh
    aggregation: AggregationOf = "sequence"
    normalize_advantage: NormalizeAdvantage = True
    kl_beta: KlBeta = 0.0
    ratio: RatioOf = "token"
    trust_region: TrustRegionOf = "clip"
    dual_clip: Number = key(
        0.0,
        "With trust_region clip, bound the ratio of negative advantages, too: 3 is PPO's dual clip, 4 the two-sided "
        "clip of INTELLECT-2; 0 for none.",
    )
    weight_max: Positive = key(20.0, "With trust_region mask, the largest weight of a token.")
    gate_positive: Positive = key(1.0, "With trust_region gate, the temperature where the advantage is above 0.")
    gate_negative: Positive = key(1.05, "With trust_region gate, the temperature where the advantage is below 0.")
    advantage: AdvantageOf = "group"
    correction: CorrectionOf = "none"
    correction_low: Positive = key(
        0.5, "Lower bound of the correction; unless it is given, 0.5 with masked and 0.99 with rejection."
    )
    correction_high: Positive = key(
        5.0, "Upper bound of the correction; unless it is given, 2 with truncated, 5 with masked, 1.01 with rejection."
    )
    sequence_mask: Number = key(
        0.0,
        "Drop sequences with a negative advantage whose mean of log pi_engine - log pi is above this; 0 for none. "
        "DeepSeek-V3.2 is the source.",
    )
    kl_estimator: KlEstimator = key(
        "k3", "The estimator of the KL term; unbiased is k3 times the ratio of the token, which is differentiated."
    )
    entropy_coef: Number = key(
        0.0, "Weight of an entropy bonus: the entropy of every token's distribution, averaged as aggregation says."
    )
    kl_target: Number = key(
        0.0, "Have kl_beta follow this KL divergence a token from the reference, step by step; 0 leaves it fixed."
    )
    entropy_target: Number = key(
        0.0, "Have entropy_coef follow this mean entropy, 0.005 up or down a step; 0 leaves it fixed."
    )
    top_entropy_quantile: Share = key(
        1.0,
        "The share of an update's tokens that get a policy gradient: those whose distribution had the highest entropy "
        "when they were sampled. 1 for all; the paper (arXiv:2506.01939) has 0.2.",
    )
    reference_interval: CountFrom0 = key(
        0,
        "Refresh the reference model every so many optimizer steps, between two rollouts; 0 keeps that of the start.",
    )
    reference_mixup: Share = key(
        1.0,
        "What a refresh takes of the policy's weights; the rest is the reference's before, so that below 1 it is a "
        "moving average.",
    )
    teacher: str | None = key(
        None,
        "A model that takes the place of the reference, so that the KL term pulls the policy towards it (on-policy "
        "distillation): a folder or a name on the hub, as in model.path, with the same tokenizer.",
    )
    kl_placement: KlPlacement = key(
        "loss",
        "Where the KL term is: in the loss of every token (loss), or its sum over a completion's tokens, by the "
        "engine's log-probs, taken off the reward (reward).",
    )

    @property
    def moves_reference(self) -> bool:
        """True if there is a reference model that does not stay that of the start: checkpoints hold its weights."""
        return self.kl_beta > 0 and self.reference_interval > 0 and self.teacher is None

    @property
    def has_teacher(self) -> bool:
        """True if the reference is another model, which the policy learns from."""
        return self.teacher is not None and self.kl_beta > 0

    @model_validator(mode="before")
    @classmethod
    def _with_own_defaults(cls, given: Any) -> Any:
        """Drop keys that are null: they mean the algorithm's own default, as configs of earlier versions wrote it.

        Add the defaults that follow from another key that is given.
        """
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        for name, choices in _FOLLOWING.items():
            chosen = found.get(name)
            found = choices.get(chosen, {}) | found if isinstance(chosen, str) else found
        if "teacher" in found:  # the estimator whose gradient is that of the reverse KL divergence
            found = {"kl_estimator": "k1" if found.get("kl_placement") == "reward" else "unbiased"} | found
        return found


class AlgorithmInFile(AlgorithmSettings):
    """The settings of an algorithm in a user's file that was not run: all of them are taken as they are.

    Configs of runs are read so. They state every setting, so the clip range here stands for no algorithm's default.
    """

    model_config = ConfigDict(extra="allow")

    paper: ClassVar[str] = "not known, because the file of the algorithm was not run"

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2

    @model_validator(mode="before")
    @classmethod
    def _with_own_defaults(cls, given: Any) -> Any:
        """Keep null where a setting of the algorithm itself may have it."""
        own = set(given) - set(cls.model_fields) if isinstance(given, dict) else set()
        return {key: value for key, value in given.items() if value is not None or key in own} if own else given
