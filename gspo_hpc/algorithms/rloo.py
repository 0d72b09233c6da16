"""RLOO: every completion against the mean of the others of its prompt."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import AdvantageOf, ClipHigh, ClipLow, NormalizeAdvantage


class Rloo(TokenRatio):
    """Leave-one-out advantages with the clipped ratio of every token."""

    paper: ClassVar[str] = "Back to Basics, arXiv 2402.14740"

    name: Literal["rloo"] = "rloo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    normalize_advantage: NormalizeAdvantage = False
    advantage: AdvantageOf = "leave_one_out"
