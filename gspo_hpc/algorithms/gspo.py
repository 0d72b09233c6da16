"""GSPO: one importance ratio per sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import SequenceRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow


class Gspo(SequenceRatio):
    """The exponential of the mean difference of log-probs as the ratio of a sequence, and a mean over sequences."""

    paper: ClassVar[str] = "Group Sequence Policy Optimization, arXiv 2507.18071"

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
