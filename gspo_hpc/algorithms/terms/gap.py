"""The gap between engine and trainer over tokens. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo_hpc.algorithms.terms.kl import k3

OUTSIDE = (0.5, 2.0)  # a ratio of engine and trainer beyond these is no rounding
_LARGEST = 20.0  # of |log ratio|: squares of larger ratios are no numbers
NAMES = ("logprob_gap", "logprob_gap_kl", "logprob_gap_weight", "logprob_gap_weight_squared", "logprob_gap_outside")


def sums(gap: Tensor, mask: Tensor, size: Tensor) -> Tensor:
    """Return the sums over the tokens of the mask of what NAMES say, and their count, [len(NAMES) + 1].

    `gap` [R] is log rho = log pi - log pi_engine of weights that are the same, and 0 outside the mask; `size` is its
    absolute value, which the caller needs, too. The sums are of that value, of k3 (an estimate of KL(engine ||
    trainer)), of rho, of rho squared, and of tokens whose rho is outside of OUTSIDE.
    """
    bounded = gap.clamp(-_LARGEST, _LARGEST)
    rho = torch.where(mask, bounded.exp(), 0.0)
    outside = mask & ((gap < math.log(OUTSIDE[0])) | (gap > math.log(OUTSIDE[1])))
    values = (size, k3(bounded), rho, rho.square(), outside.to(gap.dtype), mask.to(gap.dtype))
    return torch.stack([value.sum() for value in values])


def effective_share(weight: float, squared: float) -> float:
    """Return the effective sample size as a share of the tokens, (sum rho)^2 / (n sum rho^2), from both means."""
    return weight * weight / squared if squared > 0 else 0.0
