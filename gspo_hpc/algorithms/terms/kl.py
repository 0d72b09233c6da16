"""Estimates of a KL divergence from samples. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(x) - 1 - x of x = log q - log p [R]: an estimate of KL(p || q) from samples of p.

    It is never negative, and unbiased on samples of p (the estimator known as k3).
    """
    return torch.expm1(log_ratio) - log_ratio
