"""Line charts and stacked bars as inline SVG: fixed geometry, sensible ticks, labels at the lines themselves.

Floor 6, standard library only. Colours are CSS variables of the page (light and dark). Each chart also hands out what
its read-out under the pointer needs, as plain data; without a script it is a still picture.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_hpc.scales import Gathered, Scale, Values, gather, log_ticks, nice_ticks, number, step_ticks

MAX_POINTS = 600  # more steps than this are gathered: mean as the line, smallest to largest as a band
MAX_BARS = 90
MAX_DOTS = 40  # more single measurements than this are a line without dots
LOG_SPREAD = 30.0  # largest over smallest value from which a logarithmic axis says more
LEFT, RIGHT, TOP, BOTTOM = (
    46,
    74,
    12,
    24,
)  # margins of the plot; labels of the lines stand in the right one
LABEL_HEIGHT = 13


@dataclass(frozen=True)
class Line:
    """One series over the steps. None is a step without a value: the line is interrupted there."""

    name: str
    values: Values
    color: str = "accent"  # name of a CSS variable
    faint: bool = False  # background of another line: thin and light, without a label
    points: bool = False  # single measurements: dots joined by a thin line


@dataclass(frozen=True)
class Chart:
    """What to draw. `steps` is the common x axis; `marks` are steps at which an attempt began."""

    key: str
    title: str
    note: str
    steps: Sequence[int]
    lines: Sequence[Line]
    unit: str = ""
    marks: Sequence[int] = ()
    limit: float | None = None  # a dashed line that should not be crossed
    limit_name: str = "limit"
    from_zero: bool = False
    logarithmic: bool = False  # allowed; used where the values spread widely and are all above zero
    width: int = 400
    height: int = 188


@dataclass(frozen=True)
class Drawn:
    """SVG text, and the data of the read-out.

    `data` is empty without any value, else: x pixel, m middle step and s steps as text of each point; l the lines: n
    name, c colour, v values as text, y pixels, p whether the values are single points; u the unit.
    """

    svg: str
    data: dict[str, Any]


def line_chart(chart: Chart) -> Drawn:
    """Lines over steps. Needs at least one step; a chart without any value says so."""
    gathered = [gather(chart.steps, line.values, MAX_POINTS) for line in chart.lines]
    values = [value for one in gathered for value in (*one.low, *one.high) if value is not None]
    if not values:
        return Drawn(_empty(chart), {})
    y, ticks = _y_scale(chart, values)
    x = _x_scale(chart)
    parts = [*_grid(chart, y, ticks), *_x_axis(chart, x)]
    if chart.limit is not None and y.low < chart.limit <= y.high:
        at = y(chart.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{chart.width - RIGHT}" y1="{at}" y2="{at}"/>')
    labels: list[tuple[float, str, str]] = []
    series = []
    for line, one in zip(chart.lines, gathered, strict=True):
        xs = [x((first + last) / 2) for first, last in zip(one.first, one.last, strict=True)]
        ys = [None if value is None or (y.logarithmic and value <= 0) else y(value) for value in one.mean]
        parts += _band(line, xs, one, y) if len(chart.steps) > MAX_POINTS and not line.points else []
        parts += _draw(line, xs, ys)
        series.append(
            {
                "n": line.name,
                "c": line.color,
                "v": [number(value) for value in one.mean],
                "y": ys,
                "p": line.points,
            }
        )
        last_y = next((at for at in reversed(ys) if at is not None), None)
        if not line.faint and last_y is not None:
            last = next(value for value, at in zip(reversed(one.mean), reversed(ys), strict=True) if at is not None)
            name = f"{line.name} " if len([one for one in chart.lines if not one.faint]) > 1 else ""
            labels.append((last_y, f"{name}{number(last)}", line.color))
    if chart.limit is not None and y.low < chart.limit <= y.high:
        labels.append((y(chart.limit), chart.limit_name, "muted"))
    parts += _labels(chart, labels)
    base = gathered[0]
    data = {
        "x": [x((first + last) / 2) for first, last in zip(base.first, base.last, strict=True)],
        "m": [(first + last) / 2 for first, last in zip(base.first, base.last, strict=True)],
        "s": [_steps(first, last) for first, last in zip(base.first, base.last, strict=True)],
        "l": series,
        "u": chart.unit,
    }
    return Drawn(_svg(chart, parts), data)


def stacked_bars(chart: Chart) -> Drawn:
    """One bar a step (or a few steps), the lines of the chart on top of each other; None counts as nothing."""
    gathered = [gather(chart.steps, [value or 0.0 for value in line.values], MAX_BARS) for line in chart.lines]
    totals = [
        math.fsum(value or 0.0 for value in column) for column in zip(*(one.mean for one in gathered), strict=True)
    ]
    if not any(total > 0 for total in totals):
        return Drawn(_empty(chart), {})
    ticks = nice_ticks(0.0, max(totals), 4)
    y = Scale(0.0, ticks[-1], chart.height - BOTTOM, TOP)
    slot = (chart.width - LEFT - RIGHT) / len(totals)
    middle = [round(LEFT + slot * (index + 0.5), 1) for index in range(len(totals))]
    wide = min(round(max(slot - (1.5 if slot > 4 else 0.4), 0.8), 1), 28.0)
    parts = [*_grid(chart, y, ticks)]
    floors = [0.0] * len(totals)
    series = []
    for line, one in zip(chart.lines, gathered, strict=True):
        heights = [value or 0.0 for value in one.mean]
        path = []
        for index, height in enumerate(heights):
            top, bottom = y(floors[index] + height), y(floors[index])
            if bottom - top >= 0.1:
                path.append(f"M{middle[index] - wide / 2:.1f} {bottom}V{top}h{wide}V{bottom}z")
            floors[index] += height
        parts.append(f'<path d="{"".join(path)}" style="fill:var(--{line.color})"/>' if path else "")
        series.append(
            {
                "n": line.name,
                "c": line.color,
                "v": [number(height) for height in heights],
                "y": [],
            }
        )
    first, last = gathered[0].first, gathered[0].last
    every = max(1, math.ceil(len(totals) / 6))
    named = range(0, len(totals), every)
    parts += [_x_label(chart, middle[index], str(first[index])) for index in named]
    parts.append(_x_label(chart, chart.width - 2, "step", "end"))
    parts += _labels(
        chart,
        [
            (
                y(totals[-1]),
                number(totals[-1]) + (f" {chart.unit}" if chart.unit else ""),
                "ink",
            )
        ],
    )
    data = {
        "x": middle,
        "m": [(one + other) / 2 for one, other in zip(first, last, strict=True)],
        "s": [_steps(one, other) for one, other in zip(first, last, strict=True)],
        "l": [
            *series,
            {"n": "all", "c": "ink", "v": [number(total) for total in totals], "y": []},
        ],
        "u": chart.unit,
    }
    return Drawn(_svg(chart, parts), data)


def _steps(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def _x_scale(chart: Chart) -> Scale:
    first, last = chart.steps[0], chart.steps[-1]
    if first == last:
        first, last = first - 1, last + 1  # a single step stands in the middle
    return Scale(first, last, LEFT, chart.width - RIGHT)


def _y_scale(chart: Chart, values: Sequence[float]) -> tuple[Scale, list[float]]:
    """The axis and its ticks; the outer ticks are its ends."""
    positive = [value for value in values if value > 0]
    low, high = min(values), max(values)
    if chart.logarithmic and positive and low >= 0 and max(positive) / min(positive) >= LOG_SPREAD:
        bound = [chart.limit] if chart.limit else []
        ticks = log_ticks(min(positive + bound), max(positive + bound))
        return Scale(ticks[0], ticks[-1], chart.height - BOTTOM, TOP, logarithmic=True), ticks
    if chart.limit is not None and high > chart.limit / 3:  # near enough to matter; else it would flatten the curve
        high = max(high, chart.limit)
    if chart.from_zero or (low > 0 and low < 0.35 * high):
        low = min(low, 0.0)
    if high == low or high - low < 1e-12 * max(1e-290, abs(high), abs(low)):  # flat: room above and below the line
        room = abs(high) * 0.5 if abs(high) > 1e-280 else 1.0
        low, high = (0.0 if low >= 0 and chart.from_zero else low - room), high + room
    ticks = nice_ticks(low, high, 4)
    return Scale(ticks[0], ticks[-1], chart.height - BOTTOM, TOP), ticks


def _grid(chart: Chart, y: Scale, ticks: Sequence[float]) -> list[str]:
    parts = []
    for index, tick in enumerate(ticks):
        at = y(tick)
        kind = "axis" if index == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{chart.width - RIGHT}" y1="{at}" y2="{at}"/>')
        plain = not y.logarithmic or 1e-3 <= y.low and y.high <= 1e4
        text = number(tick) if plain else f"1e{round(math.log10(tick))}".replace("-", "−")
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 3.5:.1f}" text-anchor="end">{text}</text>')
    return parts


def _x_axis(chart: Chart, x: Scale) -> list[str]:
    bottom = chart.height - BOTTOM
    parts = [
        f'<line class="mark" x1="{x(step)}" x2="{x(step)}" y1="{TOP}" y2="{bottom}"><title>resumed</title></line>'
        for step in chart.marks
    ]
    for tick in step_ticks(chart.steps[0], chart.steps[-1]):
        parts.append(_x_label(chart, x(tick), str(tick)))
    return [*parts, _x_label(chart, chart.width - 2, "step", "end")]


def _x_label(chart: Chart, at: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{at}" y="{chart.height - BOTTOM + 16}" text-anchor="{anchor}">{text}</text>'


def _pieces(xs: Sequence[float], ys: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The points between the gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((at, value))
    return [piece for piece in pieces if piece]


def _draw(line: Line, xs: Sequence[float], ys: Sequence[float | None]) -> list[str]:
    style = f'style="stroke:var(--{line.color})"'
    fill = f'style="fill:var(--{line.color})"'
    if line.points:
        dots = [(at, value) for at, value in zip(xs, ys, strict=True) if value is not None]
        path = "L".join(f"{at} {value}" for at, value in dots)
        circles = "".join(f'<circle class="dot" cx="{at}" cy="{value}" r="3.6" {fill}/>' for at, value in dots)
        return [
            f'<path class="thin" d="M{path}" {style}/>' if len(dots) > 1 else "",
            circles,
        ]
    parts = []
    for piece in _pieces(xs, ys):
        if len(piece) == 1:  # a value between two gaps would be an invisible line
            parts.append(f'<circle cx="{piece[0][0]}" cy="{piece[0][1]}" r="{1.4 if line.faint else 2.4}" {fill}/>')
        else:
            path = "L".join(f"{at} {value}" for at, value in piece)
            parts.append(f'<path class="{"faint" if line.faint else "line"}" d="M{path}" {style}/>')
    return parts


def _band(line: Line, xs: Sequence[float], one: Gathered, y: Scale) -> list[str]:
    def place(value: float | None) -> float | None:
        return None if value is None or (y.logarithmic and value <= 0) else y(value)

    tops, bottoms = (
        [place(value) for value in one.high],
        [place(value) for value in one.low],
    )
    both = [top if bottom is not None else None for top, bottom in zip(tops, bottoms, strict=True)]
    parts = []
    for upper in _pieces(xs, both):
        lower = dict(zip(xs, bottoms, strict=True))
        path = [*upper, *((at, lower[at] or 0.0) for at, _ in reversed(upper))]
        points = " ".join(f"{at},{value}" for at, value in path)
        parts.append(f'<polygon class="band" points="{points}" style="fill:var(--{line.color})"/>')
    return parts


def _labels(chart: Chart, labels: Sequence[tuple[float, str, str]]) -> list[str]:
    """Texts beside the ends of the lines, pushed apart where they would cover each other."""
    lines = sorted(labels)
    heights: list[float] = []
    for at, _, _ in lines:
        heights.append(max(at, heights[-1] + LABEL_HEIGHT if heights else TOP + 2.0))
    limit = float(chart.height - BOTTOM)
    for index in reversed(range(len(heights))):
        heights[index] = limit = min(heights[index], limit)
        limit -= LABEL_HEIGHT
    x = chart.width - RIGHT + 8
    return [
        f'<text class="label" x="{x}" y="{at + 3.5:.1f}" style="fill:var(--{color})">{html.escape(text)}</text>'
        for at, (_, text, color) in zip(heights, lines, strict=True)
    ]


def _empty(chart: Chart) -> str:
    middle = f'x="{chart.width / 2}" y="{chart.height / 2}" text-anchor="middle"'
    return _svg(chart, [f'<text class="tick" {middle}>no values yet</text>'])


def _svg(chart: Chart, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{html.escape(chart.title)}">'
        + "".join(parts)
        + f'<g class="cross" data-top="{TOP}" data-bottom="{chart.height - BOTTOM}"></g></svg>'
    )


def as_legend(names: Mapping[str, str], shares: Mapping[str, float]) -> str:
    """Names with their colour and share, for charts whose areas have no room for a label."""
    return "".join(
        f'<span class="key"><i style="background:var(--{color})"></i>{html.escape(name)} '
        f"<b>{shares[name]:.0%}</b></span>"
        for name, color in names.items()
    )
