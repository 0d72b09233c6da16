"""A map of the experts of a mixture: the share of the tokens that each of them got in the latest update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from gspo_hpc.report.charts import Drawn
from gspo_hpc.report.curves import FULL, NARROW, Figure, Key
from gspo_hpc.report.svg import element
from gspo_hpc.runs.reader import RunData

# Shares are shown in so many steps of opacity, up to MOST times an even share; above it the colour is another.
STEPS, MOST = 8, 2.0
_LEFT, _TOP, _BOTTOM = 46, 6, 24
_HEIGHTS = (4.0, 18.0)  # pixels of a row: the least, and the most


def figures(run: RunData) -> list[Figure]:
    """Return the map as a figure; none for a model without experts, and before its first update."""
    if run.experts is None:
        return []
    step, layers = run.experts
    cells = [(share, layer, expert) for layer, row in layers.items() for expert, share in enumerate(_shares(row))]
    even = 1 / max(map(len, layers.values()))
    (most, layer, expert), (least, thin, rare) = max(cells), min(cells)
    note = (
        f"in the update of step {step}: a row for each layer, a column for each expert. An even share is {even:.2%}; "
        f"the largest is {most:.2%} (expert {expert} of layer {layer}), the smallest {least:.2%} (expert {rare} of "
        f"layer {thin})"
    )
    legend = (Key("up to twice an even share", "accent", ""), Key("more", "bad", ""))
    wide, narrow = (Drawn(_draw(layers, width), None) for width in (FULL, NARROW))
    return [Figure("experts", "Share of tokens by expert", note, "full", wide, narrow, legend)]


def _shares(row: Sequence[int]) -> list[float]:
    total = sum(row) or 1
    return [count / total for count in row]


def _draw(layers: Mapping[int, Sequence[int]], width: int) -> Markup:
    experts = max(map(len, layers.values()))
    across = (width - _LEFT - 2) / experts
    down = min(max(across, _HEIGHTS[0]), _HEIGHTS[1])
    height = round(_TOP + down * len(layers) + _BOTTOM)
    parts = [*_cells(layers, across, down), *_labels(layers, across, down, height)]
    title = "Share of tokens by expert"
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def _cells(layers: Mapping[int, Sequence[int]], across: float, down: float) -> Iterator[Markup]:
    """Yield one path for all cells of a shade: thousands of elements would make the page slow."""
    shades: dict[int, list[str]] = {}
    for number, row in enumerate(layers.values()):
        for expert, share in enumerate(_shares(row)):
            shade = min(int(share * len(row) / MOST * STEPS), STEPS)
            at = f"M{_LEFT + expert * across:.1f} {_TOP + number * down:.1f}"
            shades.setdefault(shade, []).append(f"{at}h{across:.1f}v{down:.1f}h-{across:.1f}z")
    for shade, paths in sorted(shades.items()):
        over = shade == STEPS
        style = f"fill:var(--{'bad' if over else 'accent'});opacity:{1 if over else (shade + 0.4) / STEPS:.2f}"
        yield element("path", d="".join(paths), style=style)


def _labels(layers: Mapping[int, Sequence[int]], across: float, down: float, height: int) -> Iterator[Markup]:
    numbers = list(layers)
    for place in sorted({0, len(numbers) - 1}):
        middle = _TOP + (place + 0.5) * down + 4
        yield element("text", str(numbers[place]), class_="tick", x=_LEFT - 8, y=f"{middle:.1f}", text_anchor="end")
    last = max(map(len, layers.values())) - 1
    for expert in sorted({0, last}):
        x = f"{_LEFT + (expert + 0.5) * across:.1f}"
        yield element("text", str(expert), class_="tick", x=x, y=height - _BOTTOM + 16, text_anchor="middle")
