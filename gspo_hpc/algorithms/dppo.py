"""DPPO: tokens whose probability changed too much are dropped."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AggregationOf, ClipHigh, ClipLow, CorrectionOf, TrustRegionOf


class Dppo(TokenRatio):
    """The ratio to the engine's log-probs as a weight, unless the probability of the token changed by more than 0.2."""

    paper: ClassVar[str] = "DPPO (total variation), arXiv 2602.04879"

    name: Literal["dppo"] = "dppo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    aggregation: AggregationOf = "token"
    trust_region: TrustRegionOf = "mask"
    correction: CorrectionOf = "bypass"
