"""REINFORCE++ with the mean of the group as its baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AdvantageOf, AggregationOf, ClipHigh, ClipLow, NormalizeAdvantage


class ReinforcePlusPlus(TokenRatio):
    """Rewards without the mean of their group, divided by their standard deviation in the whole rollout."""

    paper: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    aggregation: AggregationOf = "token"
    normalize_advantage: NormalizeAdvantage = False
    advantage: AdvantageOf = "reinforce_baseline"
