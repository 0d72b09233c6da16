"""The clipped policy term. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    """The policy term of each ratio, and the bound that decided it, if one did."""

    terms: Tensor  # [U]
    low: Tensor  # [U] bool: A < 0 and the ratio is below the range
    high: Tensor  # [U] bool: A > 0 and the ratio is above it


def clipped_terms(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) from log r [U] and A [U].

    The branch is chosen before the exponential, so a ratio that overflows but is clipped leaves no NaN in the gradient.
    """
    low = (advantages < 0) & (log_ratio < math.log1p(-clip_low))
    high = (advantages > 0) & (log_ratio > math.log1p(clip_high))
    free = ~(low | high) & (advantages != 0)
    ratio = torch.where(free, log_ratio, 0.0).exp()
    ratio = torch.where(low, 1.0 - clip_low, torch.where(high, 1.0 + clip_high, ratio))
    return Clipped(-ratio * advantages, low, high)
