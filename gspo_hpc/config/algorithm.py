"""The keys that every algorithm has. An algorithm itself is one file in gspo_hpc/algorithms/ (see plugins.py)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from gspo_hpc.config.section import Section, key

Aggregation = Literal["sequence", "token"]

_CLIPPED = "The ratio is clipped to [1 - clip_low, 1 + clip_high]."
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
KlBeta = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="Weight of the KL term against the reference model; with 0 there is no reference model.",
        json_schema_extra={"errorMessage": _BETA},
    ),
]


class AlgorithmSettings(Section):
    """The objective of a run: `name` picks the algorithm, the other keys change its settings."""

    paper: ClassVar[str] = "without a reference"  # what `plan` prints

    name: str = key(..., "The algorithm: a file in gspo_hpc/algorithms/, or path/to/file.py:Class.")
    clip_low: ClipLow
    clip_high: ClipHigh
    aggregation: Aggregation = key(
        "sequence",
        "The mean that the loss takes: over sequences, of the means over their tokens (sequence), or over all tokens "
        "of the batch (token).",
    )
    normalize_advantage: bool = key(True, "Divide advantages by the standard deviation of their group.")
    kl_beta: KlBeta = 0.0

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        """Drop keys that are null: they mean the algorithm's own default, as configs of earlier versions wrote it."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


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
    def _null_is_the_default(cls, given: Any) -> Any:
        """Keep null where a setting of the algorithm itself may have it."""
        own = set(given) - set(cls.model_fields) if isinstance(given, dict) else set()
        return {key: value for key, value in given.items() if value is not None or key in own} if own else given
