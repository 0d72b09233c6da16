"""The gap between engine and trainer over tokens. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

OUTSIDE = 2.0  # a ratio of engine and trainer above this, or below its inverse, is no rounding
_LARGEST = 20.0  # of |log ratio|: squares of larger ratios are no numbers
NAMES = ("logprob_gap", "logprob_gap_kl", "logprob_gap_weight", "logprob_gap_weight_squared", "logprob_gap_outside")


def sums(gap: Tensor, size: Tensor, count: Tensor) -> Tensor:
    """Return the sums over tokens of what NAMES say, and their count, [len(NAMES) + 1].

    `gap` [R] is log rho = log pi - log pi_engine of weights that are the same, and 0 for tokens that do not count;
    `size` is its absolute value, which the caller needs, too; `count` is the number of those that count. The sums are
    of that value, of k3 (an estimate of KL(engine || trainer)), of rho, of rho squared, and of tokens whose rho is
    beyond OUTSIDE. All but the last come from rho - 1, which is 0 for tokens that do not count.
    """
    bounded = gap.clamp(-_LARGEST, _LARGEST)
    beyond_one = torch.expm1(bounded)
    added, squared = beyond_one.sum(), torch.dot(beyond_one, beyond_one)
    k3 = beyond_one.sub_(bounded).sum()
    outside = torch.gt(size, math.log(OUTSIDE), out=bounded).sum()  # as 0 and 1 in floats, which are faster to add
    return torch.stack((size.sum(), k3, added + count, squared + 2.0 * added + count, outside, count))


def effective_share(weight: float, squared: float) -> float:
    """Return the effective sample size as a share of the tokens, (sum rho)^2 / (n sum rho^2), from both means."""
    return weight * weight / squared if squared > 0 else 0.0
