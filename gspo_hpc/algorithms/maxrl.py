"""MaxRL: advantages by the success rate of the group."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AdvantageOf, AggregationOf, ClipHigh, ClipLow, NormalizeAdvantage


class MaxRl(TokenRatio):
    """Advantages divided by the mean reward of the group, so that rare successes weigh more."""

    paper: ClassVar[str] = "Maximum Likelihood Reinforcement Learning, arXiv 2602.02710"

    name: Literal["maxrl"] = "maxrl"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    aggregation: AggregationOf = "token"
    normalize_advantage: NormalizeAdvantage = False
    advantage: AdvantageOf = "maxrl"
