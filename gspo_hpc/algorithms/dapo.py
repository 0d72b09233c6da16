"""DAPO's objective: GRPO with a higher upper bound and a mean over tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AggregationOf, ClipHigh, ClipLow


class Dapo(TokenRatio):
    """The ratio of every token, clipped higher above than below, averaged over all tokens of the batch."""

    paper: ClassVar[str] = "DAPO, arXiv 2503.14476"

    name: Literal["dapo"] = "dapo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    aggregation: AggregationOf = "token"
