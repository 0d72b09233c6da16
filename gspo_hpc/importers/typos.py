"""Tell a misspelt name from one that is merely not known."""

from __future__ import annotations

import re
from collections.abc import Collection

# Arguments that scripts of people's own often have, and no misspelt others (TRL's datasets).
_WORDS = ("dataset",)
_SHORT = 8  # characters of a name in which one mistake is all that a typo has


def misspelt(name: str, known: Collection[str]) -> str | None:
    """Return the known name that this one is a typo of, None if it is like none.

    Two letters at most are wrong, missing or too many, or two neighbours are exchanged; digits are as they are. In a
    dotted name the mistakes are within one part.
    """
    if name in _WORDS:
        return None
    found: tuple[int, str] | None = None
    parts = name.split(".")
    for other in known:
        others = other.split(".")
        if len(others) != len(parts):
            continue
        differing = [(mine, theirs) for mine, theirs in zip(parts, others, strict=True) if mine != theirs]
        if len(differing) != 1:
            continue
        mistakes = _mistakes(*differing[0])
        if mistakes is not None and (found is None or mistakes < found[0]):
            found = mistakes, other
    return found[1] if found else None


def _mistakes(mine: str, theirs: str) -> int | None:
    """Return how many letters of a word are wrong, None if it is no typo."""
    ours, others = mine.split("_"), theirs.split("_")
    pairs = [pair for pair in zip(ours, others, strict=False) if pair[0] != pair[1]]
    if len(ours) == len(others) and len(ours) > 1 and len(pairs) == 1:  # max_x is no misspelt min_x
        return _mistakes(*pairs[0])
    most = 1 if min(len(mine), len(theirs)) < _SHORT else 2
    if abs(len(mine) - len(theirs)) > most or re.findall(r"\d+", mine) != re.findall(r"\d+", theirs):
        return None
    if min(len(mine), len(theirs)) < 3:
        return None
    rows = [[*range(len(theirs) + 1)]]
    for row, left in enumerate(mine, 1):
        costs = [row]
        for column, right in enumerate(theirs, 1):
            cost = min(rows[-1][column] + 1, costs[-1] + 1, rows[-1][column - 1] + (left != right))
            if row > 1 and column > 1 and left == theirs[column - 2] and mine[row - 2] == right:
                cost = min(cost, rows[-2][column - 2] + 1)
            costs.append(cost)
        rows.append(costs)
    return rows[-1][-1] if rows[-1][-1] <= most else None
