"""Numbers of a record as short texts for the console's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_hpc.runs import reader
from gspo_hpc.system.text import prefixed, rounded


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """Return the finite number of the first of these keys that has one, else None."""
    return next((found for key in keys if (found := reader.value(record, key)) is not None), None)


def fixed(value: float | None, digits: int, room: int = 6) -> str:
    """Return the number with `digits` decimals, or as many as fit into `room` characters."""
    if value is None:
        return "-"
    texts = (f"{value:.{places}f}" for places in range(digits, -1, -1))
    scaled = count(value)
    return next((text for text in texts if len(text) <= room), scaled if len(scaled) <= room else f"{value:.0e}")


def short(value: float | None) -> str:
    """Return three digits, whatever the size: 0.123, 12.3, 4.5e-06."""
    if value is None:
        return "-"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return rounded(value)
    return f"{value:.1e}"


def count(value: float | None) -> str:
    """Return the number with a unit prefix where it is large: 950, 12.3k, 4.5M."""
    if value is None:
        return "-"
    scaled, letter = prefixed(value)
    return f"{scaled:.1f}{letter}" if letter else f"{value:.0f}"
