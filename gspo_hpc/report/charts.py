"""Line charts and stacked bars as inline SVG, with sensible ticks and labels beside the lines themselves.

The size and place of everything is computed here, so that a chart needs no script; its colours are CSS variables of the
page, for light and dark. Each chart also carries the data of the read-out that the page's script shows under the
pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from gspo_hpc.report.scales import Gathered, Scale, Values, gather, log_ticks, nice_ticks, number, step_ticks
from gspo_hpc.report.svg import element

MAX_POINTS = 600  # more steps than this are gathered: their mean is the line, smallest to largest value the band
MAX_BARS = 90  # of a narrow chart; a wide one has a bar for every MIN_SLOT pixels
MIN_SLOT = 4.0
LOG_SPREAD = 30.0  # ratio of largest to smallest value from which an axis may be logarithmic
LEFT, RIGHT, TOP, BOTTOM = 46, 74, 12, 24  # margins of the plot in pixels; the right one grows with the lines' labels
LABEL_HEIGHT = 13
LETTER = 7.2  # pixels: the mean width of a letter of a label in a wide font


@dataclass(frozen=True)
class Line:
    """One series over the steps. A step without a value is None and interrupts the line."""

    name: str
    values: Values
    color: str = "accent"  # name of a CSS variable
    faint: bool = False  # background of another line: thin and light, without a label
    points: bool = False  # single measurements: dots joined by a thin line


@dataclass(frozen=True)
class Chart:
    """A chart to draw. `steps` is the x axis of all lines; `marks` are the steps at which an attempt began."""

    key: str
    title: str
    note: str
    steps: Sequence[int]
    lines: Sequence[Line]
    unit: str = ""
    marks: Sequence[int] = ()
    limit: float | None = None  # a dashed line that the values should not cross
    limit_name: str = "limit"
    from_zero: bool = False
    logarithmic: bool = False  # allowed; used if the values spread widely and are all above zero
    width: int = 400
    height: int = 188
    legend: bool = False  # names and colours of the lines stand elsewhere: labels are values with a dot in the colour


@dataclass(frozen=True)
class Series:
    """One line of a read-out. `texts` holds its values as text; `y` its pixels, empty for bars."""

    name: str
    color: str
    texts: list[str]
    y: list[float | None]
    single: bool = False  # the values are single measurements, shown only at their own steps


@dataclass(frozen=True)
class ReadOut:
    """Data of the read-out under the pointer. All lists have one entry for each point of the x axis."""

    x: list[float]  # pixels
    middle: list[float]  # the middle of the steps that a point gathers
    steps: list[str]
    series: list[Series]
    unit: str


@dataclass(frozen=True)
class Drawn:
    """A chart as SVG, and the data of its read-out, which is None for a chart without values."""

    svg: Markup
    readout: ReadOut | None


class Label(NamedTuple):
    """A text beside the end of the plot, at a height in pixels."""

    at: float
    text: str
    color: str


def line_chart(chart: Chart) -> Drawn:
    """Draw lines over steps. Needs at least one step; a chart without any value says that it has none."""
    gathered = [gather(chart.steps, line.values, MAX_POINTS) for line in chart.lines]
    values = [value for one in gathered for value in (*one.low, *one.high) if value is not None]
    if not values:
        return Drawn(_empty(chart), None)
    y, ticks = _y_scale(chart, values)
    places = [[_place(y, value) for value in one.mean] for one in gathered]
    labels = _line_labels(chart, gathered, places)
    limit = y(chart.limit) if chart.limit is not None and y.low < chart.limit <= y.high else None
    if limit is not None:
        labels.append(Label(limit, chart.limit_name, "muted"))
    end = _end(chart, labels)
    x = _x_scale(chart, end)
    parts = [*_grid(chart, y, ticks, end), *_x_axis(chart, x)]
    if limit is not None:
        parts.append(element("line", class_="limit", x1=LEFT, x2=end, y1=limit, y2=limit))
    for line, one, ys in zip(chart.lines, gathered, places, strict=True):
        xs = [x((first + last) / 2) for first, last in zip(one.first, one.last, strict=True)]
        parts += _band(line, xs, one, y) if len(chart.steps) > MAX_POINTS and not line.points else []
        parts += _draw(line, xs, ys)
    parts += _labels(chart, labels, end)
    series = [
        Series(line.name, line.color, [number(value) for value in one.mean], ys, line.points)
        for line, one, ys in zip(chart.lines, gathered, places, strict=True)
    ]
    base = gathered[0]
    middle = [(first + last) / 2 for first, last in zip(base.first, base.last, strict=True)]
    return Drawn(_svg(chart, parts), ReadOut([x(at) for at in middle], middle, _steps(base), series, chart.unit))


def stacked_bars(chart: Chart) -> Drawn:
    """Draw one bar for each step, or for a few, with the lines of the chart stacked in it; None counts as zero."""
    most = max(MAX_BARS, int((chart.width - LEFT - RIGHT) / MIN_SLOT))
    gathered = [gather(chart.steps, [value or 0.0 for value in line.values], most) for line in chart.lines]
    totals = [
        math.fsum(value or 0.0 for value in column) for column in zip(*(one.mean for one in gathered), strict=True)
    ]
    if not any(total > 0 for total in totals):
        return Drawn(_empty(chart), None)
    ticks = nice_ticks(0.0, max(totals), 4)
    y = Scale(0.0, ticks[-1], chart.height - BOTTOM, TOP)
    labels = [Label(y(totals[-1]), f"{number(totals[-1])} {chart.unit}".rstrip(), "ink")]
    end = _end(chart, labels)
    slot = (end - LEFT) / len(totals)
    x = [round(LEFT + slot * (index + 0.5), 1) for index in range(len(totals))]
    width = min(round(max(slot - (1.5 if slot > 4 else 0.4), 0.8), 1), 28.0)
    parts = _grid(chart, y, ticks, end)
    floors = [0.0] * len(totals)
    series = []
    for line, one in zip(chart.lines, gathered, strict=True):
        heights = [value or 0.0 for value in one.mean]
        path = []
        for index, height in enumerate(heights):
            top, bottom = y(floors[index] + height), y(floors[index])
            if bottom - top >= 0.1:
                path.append(f"M{x[index] - width / 2:.1f} {bottom}V{top}h{width}V{bottom}z")
            floors[index] += height
        if path:
            parts.append(element("path", d="".join(path), style=f"fill:var(--{line.color})"))
        series.append(Series(line.name, line.color, [number(height) for height in heights], []))
    base = gathered[0]
    every = max(1, math.ceil(len(totals) / 6))
    parts += [_x_label(chart, x[index], str(base.first[index])) for index in range(0, len(totals), every)]
    parts.append(_x_label(chart, chart.width - 2, "step", "end"))
    parts += _labels(chart, labels, end)
    series.append(Series("all", "ink", [number(total) for total in totals], []))
    middle = [(first + last) / 2 for first, last in zip(base.first, base.last, strict=True)]
    return Drawn(_svg(chart, parts), ReadOut(x, middle, _steps(base), series, chart.unit))


def _steps(one: Gathered) -> list[str]:
    return [f"{first}" if first == last else f"{first}–{last}" for first, last in zip(one.first, one.last, strict=True)]


def _line_labels(chart: Chart, gathered: Sequence[Gathered], places: Sequence[Sequence[float | None]]) -> list[Label]:
    """Return each line's last value, with its name if there are several, at the height of that value."""
    named = not chart.legend and sum(not line.faint for line in chart.lines) > 1
    labels = []
    for line, one, ys in zip(chart.lines, gathered, places, strict=True):
        shown = [(at, value) for at, value in zip(ys, one.mean, strict=True) if at is not None]
        if not line.faint and shown:
            at, last = shown[-1]
            labels.append(Label(at, f"{line.name} {number(last)}" if named else number(last), line.color))
    return labels


def _end(chart: Chart, labels: Sequence[Label]) -> float:
    """Return the pixel at which the plot ends, so that the labels beside it have room."""
    return chart.width - max(RIGHT, round(8 + LETTER * max((len(label.text) for label in labels), default=0)))


def _x_scale(chart: Chart, end: float) -> Scale:
    first, last = chart.steps[0], chart.steps[-1]
    if first == last:
        first, last = first - 1, last + 1  # a single step stands in the middle
    return Scale(first, last, LEFT, end)


def _y_scale(chart: Chart, values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return the axis and its ticks; the first and last tick are its ends."""
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


def _place(y: Scale, value: float | None) -> float | None:
    """Return the pixel of a value, or None if it has no place on the axis."""
    return None if value is None or (y.logarithmic and value <= 0) else y(value)


def _grid(chart: Chart, y: Scale, ticks: Sequence[float], end: float) -> list[Markup]:
    parts = []
    for index, tick in enumerate(ticks):
        at = y(tick)
        kind = "axis" if index == 0 else "grid"
        parts.append(element("line", class_=kind, x1=LEFT, x2=end, y1=at, y2=at))
        plain = not y.logarithmic or 1e-3 <= y.low and y.high <= 1e4
        text = number(tick) if plain else f"1e{round(math.log10(tick))}".replace("-", "−")
        parts.append(element("text", text, class_="tick", x=LEFT - 8, y=f"{at + 3.5:.1f}", text_anchor="end"))
    return parts


def _x_axis(chart: Chart, x: Scale) -> list[Markup]:
    parts = []
    for step in chart.marks:
        note, at = element("title", f"resumed at step {step}"), x(step)
        parts.append(element("line", note, class_="mark", x1=at, x2=at, y1=TOP, y2=chart.height - BOTTOM))
    for tick in step_ticks(chart.steps[0], chart.steps[-1]):
        parts.append(_x_label(chart, x(tick), str(tick)))
    return [*parts, _x_label(chart, chart.width - 2, "step", "end")]


def _x_label(chart: Chart, at: float, text: str, anchor: str = "middle") -> Markup:
    return element("text", text, class_="tick", x=at, y=chart.height - BOTTOM + 16, text_anchor=anchor)


def _pieces(xs: Sequence[float], ys: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Split a line at its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((at, value))
    return [piece for piece in pieces if piece]


def _draw(line: Line, xs: Sequence[float], ys: Sequence[float | None]) -> list[Markup]:
    stroke, fill = f"stroke:var(--{line.color})", f"fill:var(--{line.color})"
    if line.points:
        dots = [(at, value) for at, value in zip(xs, ys, strict=True) if value is not None]
        circles = [element("circle", class_="dot", cx=at, cy=value, r=3.6, style=fill) for at, value in dots]
        joined = [element("path", class_="thin", d=_path(dots), style=stroke)] if len(dots) > 1 else []
        return joined + circles
    parts = []
    for piece in _pieces(xs, ys):
        if len(piece) == 1:  # a value between two gaps would be an invisible line
            at, value = piece[0]
            parts.append(element("circle", cx=at, cy=value, r=1.4 if line.faint else 2.4, style=fill))
        else:
            parts.append(element("path", class_="faint" if line.faint else "line", d=_path(piece), style=stroke))
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{at} {value}" for at, value in points)


def _band(line: Line, xs: Sequence[float], one: Gathered, y: Scale) -> list[Markup]:
    tops, bottoms = [_place(y, value) for value in one.high], [_place(y, value) for value in one.low]
    both = [top if bottom is not None else None for top, bottom in zip(tops, bottoms, strict=True)]
    lower = dict(zip(xs, bottoms, strict=True))
    parts = []
    for upper in _pieces(xs, both):
        path = [*upper, *((at, lower[at] or 0.0) for at, _ in reversed(upper))]
        points = " ".join(f"{at},{value}" for at, value in path)
        parts.append(element("polygon", class_="band", points=points, style=f"fill:var(--{line.color})"))
    return parts


def _labels(chart: Chart, labels: Sequence[Label], end: float) -> list[Markup]:
    """Return texts beside the end of the plot, pushed apart where they would overlap."""
    ordered = sorted(labels)
    heights: list[float] = []
    for label in ordered:
        heights.append(max(label.at, heights[-1] + LABEL_HEIGHT if heights else TOP + 2.0))
    limit = float(chart.height - BOTTOM)
    for index in reversed(range(len(heights))):
        heights[index] = limit = min(heights[index], limit)
        limit -= LABEL_HEIGHT
    placed = list(zip(heights, ordered, strict=True))
    if not chart.legend:
        return [_label(end + 8, at, one.text, one.color) for at, one in placed]
    dots = [
        element("circle", cx=end + 9, cy=f"{at:.1f}", r=3.2, style=f"fill:var(--{one.color})") for at, one in placed
    ]
    return [*dots, *(_label(end + 16, at, one.text, "ink") for at, one in placed)]


def _label(x: float, at: float, text: str, color: str) -> Markup:
    return element("text", text, class_="label", x=x, y=f"{at + 3.5:.1f}", style=f"fill:var(--{color})")


def _empty(chart: Chart) -> Markup:
    text = element("text", "no values yet", class_="tick", x=chart.width / 2, y=chart.height / 2, text_anchor="middle")
    return _svg(chart, [text])


def _svg(chart: Chart, parts: Sequence[Markup]) -> Markup:
    cross = element("g", "", class_="cross", data_top=TOP, data_bottom=chart.height - BOTTOM)
    box = f"0 0 {chart.width} {chart.height}"
    return element("svg", *parts, cross, viewBox=box, role="img", aria_label=chart.title)
