"""Fill bins best-fit decreasing: of one list of sizes, or of thousands of lists at once.

The bins of a list do not depend on other lists, nor on which of the two ways below fills them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# One round over all lists takes about as long as this many sizes one after the other.
_SIZES_OF_A_ROUND = 32


def best_fit(lists: Ints, sizes: Ints, room: Ints) -> Ints:
    """Return the bin of every size within its list, counted from 0.

    `lists` [N] is the list of each size, ascending from 0, and `room` [lists] that of an empty bin, at least the
    largest size. The sizes of a list are placed by descending size, equal ones in their order. Each goes into the bin
    in which it leaves the least room, into a new one if it fits into none.
    """
    order = np.lexsort((-sizes, lists))
    counts = np.bincount(lists, minlength=len(room))
    ends = np.cumsum(counts)
    bins = np.empty(len(sizes), np.int64)
    if counts.max(initial=0) * _SIZES_OF_A_ROUND > len(sizes):
        for begin, end, free in zip((ends - counts).tolist(), ends.tolist(), room.tolist(), strict=True):
            places = order[begin:end]
            bins[places] = _one_list(sizes[places].tolist(), free)
        return bins
    most_first = np.argsort(-counts, kind="stable")
    firsts, counts, room = (ends - counts)[most_first], counts[most_first], room[most_first]
    free = np.repeat(room[:, None], 4, axis=1)  # of every bin of a list, and of at least one that is still empty
    for turn in range(int(counts.max(initial=0))):
        active = int(np.searchsorted(-counts, -turn))  # the lists that have more than `turn` sizes
        places = order[firsts[:active] + turn]
        size = sizes[places]
        left = free[:active] - size[:, None]
        chosen = np.where(left < 0, np.iinfo(np.int64).max, left).argmin(axis=1)  # the first of equal ones
        free[np.arange(active), chosen] -= size
        bins[places] = chosen
        if chosen.max(initial=0) == free.shape[1] - 1:
            free = np.hstack([free, np.repeat(room[:, None], free.shape[1], axis=1)])
    return bins


def _one_list(sizes: list[int], room: int) -> list[int]:
    """Return the bin of every size; they are given in the order in which they are placed."""
    found, bins = [], 0
    free: list[tuple[int, int]] = []  # (room, number of the bin), ascending
    for size in sizes:
        place = bisect_left(free, (size, -1))
        if place == len(free):
            left, number, bins = room, bins, bins + 1
        else:
            left, number = free.pop(place)
        insort(free, (left - size, number))
        found.append(number)
    return found
