"""Numbers of a record as short texts for the console's table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """Return the finite number of the first of these keys that has one, else None."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None


def fixed(value: float | None, digits: int, room: int = 6) -> str:
    """Return the number with `digits` decimals, or as many as fit into `room` characters."""
    if value is None:
        return "-"
    texts = (f"{value:.{places}f}" for places in range(digits, -1, -1))
    return next((text for text in texts if len(text) <= room), count(value))


def short(value: float | None) -> str:
    """Return three digits, whatever the size: 0.123, 12.3, 4.5e-06."""
    if value is None:
        return "-"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.1e}"


def count(value: float | None) -> str:
    """Return the number with a unit prefix where it is large: 950, 12.3k, 4.5M."""
    if value is None:
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if letter == 'k' else size):.1f}{letter}"
    return f"{value:.0f}"
