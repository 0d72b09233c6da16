"""SAPO: a smooth gate in the place of clipping."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow, TrustRegionOf


class Sapo(TokenRatio):
    """The ratio of every token through a sigmoid, which is steeper for negative advantages."""

    paper: ClassVar[str] = "Soft Adaptive Policy Optimization, arXiv 2511.20347"

    name: Literal["sapo"] = "sapo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    trust_region: TrustRegionOf = "gate"
