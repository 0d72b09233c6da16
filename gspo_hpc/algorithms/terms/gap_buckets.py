"""The gap between engine and trainer by where tokens stand: behind how long a cached prefix, and at which position.

A stale prefix cache shows behind cached prefixes only; wrong rotary embeddings show more with every position.
"""

from __future__ import annotations

import torch
from torch import Tensor

CACHED = (0, 256, 2048)  # tokens of the prompt that came from the cache, at most
POSITIONS = (256, 1024, 4096, 16384)  # tokens before this one and the token itself, at most


def _names(what: str, bounds: tuple[int, ...]) -> tuple[str, ...]:
    return (*(f"logprob_gap/{what}_{bound}" for bound in bounds), f"logprob_gap/{what}_more")


CACHED_NAMES, POSITION_NAMES = _names("cached", CACHED), _names("position", POSITIONS)
NAMES = (*CACHED_NAMES, *POSITION_NAMES)


def sums_by_bucket(gap: Tensor, mask: Tensor, cached: Tensor | None, positions: Tensor) -> Tensor:
    """Return pairs (sum of |gap|, tokens) [len(NAMES), 2] over the tokens [R] of the mask, in the order of NAMES.

    Without `cached` no token of a prompt came from the cache.
    """
    pairs = torch.stack((torch.where(mask, gap, 0.0), mask.to(gap.dtype)), dim=1)
    table = pairs.new_zeros(len(NAMES), 2)
    if cached is None:
        table[0] = pairs.sum(0)
    else:
        table.index_add_(0, torch.bucketize(cached, cached.new_tensor(CACHED)), pairs)
    place = len(CACHED_NAMES) + torch.bucketize(positions, positions.new_tensor(POSITIONS))
    return table.index_add_(0, place, pairs)
