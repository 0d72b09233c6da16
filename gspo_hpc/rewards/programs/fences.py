"""Fenced blocks in a text, as Markdown has them, found in time that grows with the length of the text alone.

A model that repeats a fence thousands of times makes a search from each of them take longer than a grader may.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

# A fence of three or more of ` or ~ on a line of its own, with a language; a quantifier with + gives nothing back.
_OPENS = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^`]*+")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block; a block ends at the next fence that is as long as its own."""
    lines = text.split("\n")
    opening = [_OPENS.fullmatch(line) for line in lines]
    ends = _ends(lines, opening)
    place = 0
    while place < len(lines):
        found, end = opening[place], ends[place]
        if found is None or end is None:
            place += 1
            continue
        yield found[2], "".join(f"{line}\n" for line in lines[place + 1 : end])
        place = end + 1


def _ends(lines: list[str], opening: list[re.Match[str] | None]) -> list[int | None]:
    """Return by line where the block ends that it opens; None where it opens none, or no fence ends it."""
    found: list[int | None] = [None] * len(lines)
    # By sign, of the fences behind a line: their lengths, below 0, and their lines. The nearest comes last, and one
    # that is no longer than another before it is left out, so the lengths are in order.
    lengths: dict[str, list[int]] = {"`": [], "~": []}
    places: dict[str, list[int]] = {"`": [], "~": []}
    for place in range(len(lines) - 1, -1, -1):
        if (opens := opening[place]) is not None:
            sign, length = opens[1][0], len(opens[1])
            if (nearest := bisect_right(lengths[sign], -length)) > 0:
                found[place] = places[sign][nearest - 1]
        fence = lines[place].strip(" \t")
        if fence and not fence.strip("`~"):
            sign = fence[0]
            length = len(fence) - len(fence.lstrip(sign))
            while lengths[sign] and -lengths[sign][-1] <= length:
                lengths[sign].pop()
                places[sign].pop()
            lengths[sign].append(-length)
            places[sign].append(place)
    return found
