"""GRPO: one importance ratio per token."""

from __future__ import annotations

from typing import ClassVar, Literal

from gspo_hpc.algorithms.objective import TokenRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow


class Grpo(TokenRatio):
    """The ratio of every token, averaged over the tokens of a sequence and then over sequences."""

    paper: ClassVar[str] = "DeepSeekMath, arXiv 2402.03300"

    name: Literal["grpo"] = "grpo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
