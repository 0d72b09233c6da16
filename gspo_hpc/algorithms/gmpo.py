"""GMPO: the geometric mean of clipped ratios of tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow, TrustRegionOf


class Gmpo(TokenRatio):
    """The geometric mean of the ratios of a sequence's tokens, each clipped in log space."""

    paper: ClassVar[str] = "Geometric-Mean Policy Optimization, arXiv 2507.20673"

    name: Literal["gmpo"] = "gmpo"
    clip_low: ClipLow = 0.4
    clip_high: ClipHigh = 0.4
    trust_region: TrustRegionOf = "geometric"
