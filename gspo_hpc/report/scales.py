"""Numbers prepared for charts: gathered steps, moving averages, axes with round ticks, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gspo_hpc.system.text import prefixed

Values = Sequence[float | None]


@dataclass(frozen=True)
class Gathered:
    """Neighbouring steps gathered into points. All lists have one entry per point; `first` to `last` are its steps."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    mean: list[float | None] = field(default_factory=list)
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)


def gather(steps: Sequence[int], values: Values, most: int) -> Gathered:
    """Gather steps into at most `most` points of equally many neighbours, with their mean, smallest and largest value.

    Steps without a value are left out; a point whose steps all lack one has None.
    """
    result = Gathered()
    size = max(1, math.ceil(len(steps) / most))
    for start in range(0, len(steps), size):
        chunk = [value for value in values[start : start + size] if value is not None]
        result.first.append(steps[start])
        result.last.append(steps[min(start + size, len(steps)) - 1])
        result.mean.append(math.fsum(chunk) / len(chunk) if chunk else None)
        result.low.append(min(chunk, default=None))
        result.high.append(max(chunk, default=None))
    return result


def moving_average(values: Values, window: int) -> list[float | None]:
    """Return at each place the mean of the latest `window` known values, and None before the first value."""
    result: list[float | None] = []
    recent: list[float] = []
    for value in values:
        if value is not None:
            recent = [*recent[-(window - 1) :], value] if window > 1 else [value]
        result.append(math.fsum(recent) / len(recent) if recent else None)
    return result


@dataclass(frozen=True)
class Scale:
    """A mapping from values to pixels, with `low` at `start` and `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, rounded to a tenth; values outside the axis are placed at its ends."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        share = (at - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return about `most` round numbers, 1, 2, 2.5 or 5 times a power of ten apart, that cover `low` to `high`."""
    assert high > low
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9)),
        10 * power,
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def step_ticks(first: int, last: int, most: int = 6) -> list[int]:
    """Return round whole steps from `first` to `last`."""
    if last <= first:
        return [first]
    ticks = [int(tick) for tick in nice_ticks(first, last, most) if tick == int(tick)]
    return [tick for tick in ticks if first <= tick <= last] or [first, last]


def log_ticks(low: float, high: float) -> list[float]:
    """Return about five powers of ten that cover `low` to `high`."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    first = max(first, -300)  # smaller powers have no float
    last = max(last, first + 1)
    stride = max(1, math.ceil((last - first) / 4))
    return [10.0**power for power in range(first, last + stride, stride)]


def number(value: float | None) -> str:
    """Return a value as a person would write it: 0.62, 24.1, 1,234, 3.1e-6, 12.4k."""
    if value is None:
        return "–"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e15 or size < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}".replace("-", "−")
    scaled, prefix = prefixed(value)
    if prefix:
        return f"{scaled:.1f}".removesuffix(".0").replace("-", "−") + prefix
    if size >= 100:
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.{3 if size < 1 else 2 if size < 10 else 1}f}"
    return (text.rstrip("0").rstrip(".") or "0").replace("-", "−")
