"""Frequencies of rotary embeddings: plain, linear, llama3, yarn.

Sources: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); Meta's Llama 3.1 model code; YaRN
(2309.00071). Angles are position x inverse frequency, in fp32 whatever the model's dtype is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo_hpc.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the inverse frequencies [head_dim / 2] fp32, in radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    if rope.kind == "llama3":
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        turns = rope.original_length * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:
        assert rope.kind == "yarn", rope.kind
        first, last = (_dimension(rope, turns, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        kept = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return stretched * (1.0 - kept) + plain * kept


def _dimension(rope: Rope, turns: float, head_dim: int) -> float:
    """Return the (fractional) pair of dimensions that makes `turns` full turns within the original context."""
    return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
