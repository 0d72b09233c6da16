"""Dr. GRPO: GRPO without the biases of length and of difficulty."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AggregationOf, ClipHigh, ClipLow, NormalizeAdvantage


class DrGrpo(TokenRatio):
    """Advantages without the standard deviation, and sums over tokens divided by a fixed length."""

    paper: ClassVar[str] = "Understanding R1-Zero-Like Training, arXiv 2503.20783"

    name: Literal["dr_grpo"] = "dr_grpo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    aggregation: AggregationOf = "fixed_length"
    normalize_advantage: NormalizeAdvantage = False
