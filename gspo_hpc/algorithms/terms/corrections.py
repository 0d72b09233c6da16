"""Weights that correct for the gap between engine and trainer. Shapes: see :mod:`gspo_hpc.algorithms.terms`.

A completion is sampled by the engine, whose log-probs differ a little from the trainer's for the same weights. The
ratio rho = pi_old / pi_engine of a token, or of a sequence the exponential of the mean of log rho, says by how much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo_hpc.algorithms.terms.aggregation import Samples


def truncated(log_rho: Tensor, high: float) -> Tensor:
    """Return min(rho, high) [U] from log rho [U] (TIS)."""
    return log_rho.clamp(max=math.log(high)).exp()


def masked(log_rho: Tensor, low: float, high: float) -> Tensor:
    """Return rho within [low, high], and 0 outside, [U] from log rho [U] (IcePop, MIS)."""
    inside = (log_rho >= math.log(low)) & (log_rho <= math.log(high))
    return torch.where(inside, log_rho, 0.0).exp() * inside


def accepted(gap: Tensor, samples: Samples, low: float, high: float) -> Tensor:
    """Return 1 for sequences [S] whose ratio is within [low, high], else 0, from log rho of tokens, `gap` [R]."""
    mean = samples.sum(gap) / samples.lengths
    return ((mean >= math.log(low)) & (mean <= math.log(high))).to(gap.dtype)


def drifted_away(moved: Tensor, advantages: Tensor, samples: Samples, limit: float) -> Tensor:
    """Return 0 for sequences [S] with A < 0 that became much less likely since they were sampled, else 1.

    `moved` [R] is log pi_engine - log pi; its mean over the sequence is above `limit` (DeepSeek-V3.2's mask).
    """
    far = samples.sum(moved) / samples.lengths > limit
    return (~(far & (advantages < 0))).to(moved.dtype)
