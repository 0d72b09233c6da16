"""CISPO: bounded weights in the place of clipping, so that no token loses its gradient."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AggregationOf, ClipHigh, TrustRegionOf

_LOW = "Weights are at least 1 - clip_low: 1 is no lower bound."


class Cispo(TokenRatio):
    """The ratio of every token as a weight without gradient, bounded above and averaged over all tokens."""

    paper: ClassVar[str] = "MiniMax-M1, arXiv 2506.13585"

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, description=_LOW)] = 1.0
    clip_high: ClipHigh = 5.0
    aggregation: AggregationOf = "token"
    trust_region: TrustRegionOf = "weight"
