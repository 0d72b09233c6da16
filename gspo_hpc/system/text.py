"""Small pieces of text, written the same way everywhere: durations, numbers, near misses, ends of logs, JSON."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30  # bytes
# What is raised where a value of another form than the expected one is taken apart.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "?")  # without tab and newline
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
_ORPHANED = "EOFError: Ran out of input"  # of multiprocessing, whose child reads what its parent did not write any more


def duration(seconds: float) -> str:
    """Return a time as 45s, 12m05s, 3h20m or 4d06h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    days = whole // 86400
    return f"{days}d{whole // 3600 % 24:02d}h" if days < 100 else f"{days}d"


def gib(count: float) -> str:
    """Return a number of bytes as 1.5 GiB or 12 MiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"


def in_gib(count: float, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit: 1.5, or 0.2 for a column whose head has the unit."""
    return f"{count / GIB:.{digits}f}"


def rounded(value: float) -> str:
    """Return a number as text of three digits: 0.123, 12.3, 4.56e-07."""
    return f"{value:.3g}"


def prefixed(value: float) -> tuple[float, str]:
    """Return a number from ten thousand on as one with a prefix: (12.3, "k"), (4.5, "M"); smaller ones as they are."""
    for least, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return value / unit, letter
    return value, ""


def counted(count: int, what: str) -> str:
    """Return a number of things: 1 rank, 2 ranks."""
    return f"{count} {what}{'s' * (count != 1)}"


def first_line(text: str) -> str:
    """Return the first line of a text that is not empty, without the blanks around it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def shortened(text: str, length: int = 200) -> str:
    """Return a text in at most `length` characters, with "…" at its end where some are left out."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def printable(text: str) -> str:
    """Return a text with ? for each control character, which a terminal would obey: a path or a log may hold some."""
    return text.translate(_CONTROLS)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the one of `names` that is most like `name`; None if none is like it.

    `cutoff`: the least similarity, from 0 (anything) to 1 (the same), as difflib measures it. The default fits a word
    among a few others; long names that differ in one part need more, short ones less. A single name that goes on where
    `name` ends (time_minutes for time) is like it, too.
    """
    import difflib  # only when something is misspelt: a command that is right starts sooner without it

    every = list(names)
    longer = [one for one in every if len(name) >= 3 and one.startswith(f"{name}_")]
    close = difflib.get_close_matches(name, every, n=1, cutoff=cutoff)
    return next(iter(close), longer[0] if len(longer) == 1 else None)


def near_miss(
    name: str,
    names: Collection[str],
    *,
    shown: Callable[[str], object] = str,
    known: bool = False,
    cutoff: float = 0.65,
) -> str:
    """Return the end of a sentence about a name that is none of `names`: "; nearest: NAME".

    Where none is like it, the end is empty, or with `known` a list of them all. `shown` says how the nearest name is
    written. `cutoff`: see :func:`nearest`.
    """
    if (found := nearest(name, names, cutoff)) is not None:
        return f"; nearest: {shown(found)}"
    return f"; known: {', '.join(names) or 'none'}" if known else ""


def tail(path: Path, count: int, begin: int = 0) -> str:
    """Return the last `count` bytes of a file as text, without what stands before byte `begin`.

    Bytes that are not UTF-8 are replaced. Raises OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - count))
        return file.read().decode("utf-8", "replace")


def from_traceback(text: str) -> str:
    """Return the text of a log from its last traceback on, with the lines after it; all of it if there is none."""
    starts = [found.start() for found in _TRACEBACK.finditer(text)]
    return text[starts[-1] :] if starts else text


def last_traceback(text: str) -> str | None:
    """Return the last traceback in the text of a log, up to the first line of its error; None if there is none.

    That of a process which was being started as its parent ended tells nothing: it is passed over.
    """
    for start in reversed([found.start() for found in _TRACEBACK.finditer(text)]):
        kept: list[str] = []
        for line in text[start:].splitlines():
            kept.append(line)
            if len(kept) > 1 and line and not line[0].isspace():
                break
        if not (kept[-1] == _ORPHANED and any("in spawn_main" in line for line in kept)):
            return "\n".join(kept) + "\n"
    return None


def parse_json(text: str | bytes, *, finite: bool = True, unique: bool = False) -> Any:
    """Return the value of a JSON text of another's making: a checkpoint, a run, a data file, the answer of a service.

    Raises ValueError for any other text. Python's own reader takes NaN and Infinity, which are no JSON and fail where a
    whole number is made of them, and raises RecursionError for a text that is nested too deeply.

    `finite`: numbers that are not finite are refused: NaN, Infinity, and those beyond the range of floats, as 1e999.
    `unique`: a key that an object has twice is refused.
    """
    options: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is beyond the range of numbers")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return found
