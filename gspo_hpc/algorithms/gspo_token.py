"""GSPO-token: GSPO's ratio per sequence, with a gradient for every token."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import SequenceRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow, RatioOf


class GspoToken(SequenceRatio):
    """The same value of the ratio as GSPO, where every token has its own gradient."""

    paper: ClassVar[str] = "Group Sequence Policy Optimization, section 4.3, arXiv 2507.18071"

    name: Literal["gspo_token"] = "gspo_token"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    ratio: RatioOf = "sequence_token"
