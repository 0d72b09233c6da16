"""Estimates of a KL divergence from samples. Shapes: see :mod:`gspo_hpc.algorithms.terms`.

With x = log q - log p [R] of samples of p, estimates of KL(p || q): k1 = -x and k3 = exp(x) - 1 - x are unbiased,
k2 = x^2 / 2 and |x| are not. As a term of a loss, what counts is the gradient: that of k2 is the gradient of the
divergence while p is the policy that sampled, that of k3 is not, and that of k1 is zero in expectation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """Return -x [R], which may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return x^2 / 2 [R]."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(x) - 1 - x of x = log q - log p [R]: an estimate of KL(p || q) from samples of p.

    It is never negative, and unbiased on samples of p (the estimator known as k3).
    """
    return torch.expm1(log_ratio) - log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """Return |x| [R]."""
    return log_ratio.abs()


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "absolute": absolute}
