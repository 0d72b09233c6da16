"""Sums of an expert's weights, by which engine and trainer tell whose weights they have.

A sum does not depend on the order of weights. So it is the same however a kernel wants them, and those of the parts of
an expert that several ranks or workers hold add up to those of the whole. Rounding aside, no two experts have the same.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Sequence

import numpy as np
import torch

from gspo_hpc.data.records import Floats

NUMBERS = 4  # of an expert: the sum and the sum of squares of its gate and up projections, then of its down projection
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_AT_ONCE = 16 << 20  # weights
Held = tuple[int, list[int], bytes]  # a layer's number, some of its experts, and their sums: float32 [experts, NUMBERS]


def of_experts(stack: torch.Tensor) -> torch.Tensor:
    """Return the sum and the sum of squares [experts, 2] of each expert's weights in `stack` [experts, rows, columns].

    They are computed in float32, of a few experts at a time: a card that an engine fills has no room for a copy of all.
    """
    found = []
    for some in stack.split(max(1, _AT_ONCE // max(1, stack[0].numel()))):
        total = some.sum((1, 2), dtype=torch.float32)
        norm = torch.linalg.vector_norm(some, 2, (1, 2), dtype=torch.float32)
        found.append(torch.stack((total, norm.square()), 1))
    return torch.cat(found)


def layer_of(name: str) -> int | None:
    """Return the number of the layer in the name of a tensor or a module; None if it has none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def to_text(sums: Floats) -> str:
    """Return sums [layers, experts, NUMBERS] as a text, from which :func:`from_text` makes the same again."""
    return base64.b64encode(sums.astype("<f4").tobytes()).decode()


def from_text(text: str, layers: int) -> Floats:
    """Return what :func:`to_text` was given. Raises ValueError for other texts."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(layers, -1, NUMBERS)


def added(workers: Sequence[Sequence[Held]], layers: int, experts: int) -> Floats:
    """Return the sums [layers, experts, NUMBERS] of what several workers hold of experts, NaN for what none holds.

    Each holds some of the experts, or a part of each. Others than the model's own experts are left out. Sums of weights
    that are no numbers are infinite.
    """
    found = np.full((layers, experts, NUMBERS), np.nan, np.float32)
    for layer, numbers, values in itertools.chain.from_iterable(workers):
        sums = np.frombuffer(values, np.float32).reshape(len(numbers), NUMBERS)
        sums = np.where(np.isfinite(sums), sums, np.inf)
        for number, one in zip(numbers, sums, strict=True):
            if number < experts:
                before = found[layer, number]
                found[layer, number] = np.where(np.isnan(before), 0.0, before) + one
    return found
