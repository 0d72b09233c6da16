"""Numbers with units, such as 4GiB, 400Gb/s and 30min, for settings whose names say what they count."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(i?)(b|bytes?)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtT])i?(B|[bB]ytes?|b|bits?)(?:/s|ps)")
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|sec|seconds?|m|min|minutes?|h|hours?)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# By the end of a setting's name: what it counts. The longest that fits is the one.
_ENDS = {"_gb_per_s": "GB/s", "_gb": "GB", "_mb": "MB", "timeout": "seconds", "_seconds": "seconds"}


def counted(key: str) -> str:
    """Return the unit that a setting counts, by its name; empty for one without a unit."""
    return next((unit for end, unit in _ENDS.items() if key.endswith(end)), "")


def converted(text: str, unit: str) -> float | None:
    """Return a number with a unit of its own in `unit`; None for other text.

    A GB of memory is one of 1024 MB here, as tools print it, and one of a rate has 1000 MB, as data sheets do.
    """
    given = text.strip()
    if unit == "seconds":
        found = _TIME.fullmatch(given.lower())
        return None if found is None else float(found[1]) * _SECONDS["ms" if found[2] == "ms" else found[2][0]]
    found = (_RATE if unit.endswith("/s") else _SIZE).fullmatch(given)
    if found is None:
        return None
    steps = "kmgt".index(found[2].lower()) - "kmgt".index(unit[0].lower())
    if unit.endswith("/s"):
        return float(found[1]) * 1000.0**steps / (8 if found[3].startswith("b") and "yte" not in found[3] else 1)
    return float(found[1]) * 1024.0**steps
