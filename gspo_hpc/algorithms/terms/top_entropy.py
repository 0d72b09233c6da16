"""The entropy that the most uncertain tokens of a global batch reach, found without bringing them to one place.

Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939): only a share of the tokens, those with the highest
entropy, get a policy gradient. Here numpy is enough: the choice is made before tensors are built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]

_SHIFTS = (24, 16, 8, 0)  # the digits of a number of 32 bits, 256 values each, the highest one first


def thresholds(entropies: Sequence[Floats], share: float, add: Callable[[Counts], Counts]) -> list[np.float32]:
    """Return for each batch the lowest entropy that still belongs to the highest `share` of its tokens.

    `entropies` has this rank's tokens of each batch [tokens] in nats, and `add` returns the sum of an array of counts
    [batches, 256] over all ranks, which call it four times. With n tokens in a batch it is its k-th highest entropy,
    k = ceil(share n): exact, and the same however tokens are spread over ranks. It is infinite where n is 0.

    Not-negative numbers in fp32 have the order of their bits, so the search fixes eight bits at a time.
    """
    keys = [_clean(values).view(np.uint32) for values in entropies]
    found = np.zeros(len(keys), np.uint32)
    wanted: list[int] | None = None  # k, less the tokens above what is found so far
    for shift in _SHIFTS:
        mine = np.zeros((len(keys), 256), np.int64)
        for row, (key, prefix) in enumerate(zip(keys, found, strict=True)):
            higher = key.astype(np.uint64) >> np.uint64(shift + 8)  # a shift by all 32 bits is not defined for 32 bits
            inside = key[higher == np.uint64(prefix) >> np.uint64(shift + 8)]
            mine[row] = np.bincount((inside >> np.uint32(shift)) & np.uint32(255), minlength=256)
        counts = add(mine)
        if wanted is None:
            wanted = [math.ceil(Fraction(str(share)) * int(row.sum())) for row in counts]
        for row, k in enumerate(wanted):
            from_above = np.cumsum(counts[row, ::-1])
            if k == 0:
                continue
            place = int(np.searchsorted(from_above, k))
            wanted[row] = k - (int(from_above[place - 1]) if place else 0)
            found[row] |= np.uint32(255 - place << shift)
    assert wanted is not None
    lowest = found.view(np.float32)
    return [value if k else np.float32(np.inf) for value, k in zip(lowest, wanted, strict=True)]


def reached(entropies: Floats, threshold: np.float32) -> npt.NDArray[np.uint8]:
    """Return 1 [tokens] where the entropy is at or above the threshold, and 0 elsewhere."""
    return (_clean(entropies) >= threshold).astype(np.uint8)


def _clean(entropies: Floats) -> Floats:
    """Return the entropies without what rounding may leave below 0, and with 0 for what is no number."""
    finite = np.nan_to_num(entropies.astype(np.float32), nan=0.0)
    return np.maximum(finite, np.float32(0.0)) + np.float32(0.0)  # the sum makes 0 of -0, whose bits are another number
