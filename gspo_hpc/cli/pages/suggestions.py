"""The page of ``gspo-hpc suggest``: what differs between layouts as a table, then the reasons of each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from gspo_hpc.cli.pages.render import grid, item, width
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.planning.estimates.phases import HEADROOM, percent
from gspo_hpc.planning.layouts import PRINTED, Layout
from gspo_hpc.planning.settings import value_of


def suggestions(
    config: Config, found: Sequence[Layout], own: tuple[float, float, float] | None
) -> Iterator[RenderableType]:
    """Yield a table of layouts, best first, and for each its reasons and the settings to paste behind the config.

    `own`: seconds of a step, tokens/s/GPU and headroom of the config as it is; None if its own layout does not hold.
    """
    less = f"a layout that leaves less than {HEADROOM:.0%} of the GPU's memory counts as slower"
    yield item("", f"ranked by the time of a step; {less} (docs/plan.md); * differs from the config")
    if (like := next((layout.rates_of for layout in found), None)) is not None:
        unknown = f"cluster.gpu does not say which GPUs these are, so times assume that they are as fast as {like}"
        yield item("", f"{unknown}: the order is worth more than the seconds")
    yield ""
    yield from _tables(config, found, own)
    for place, layout in enumerate(found, 1):
        yield ""
        yield item(f"{place}. ", f"{layout.seconds:.1f} s a step; memory: {layout.risk}")
        yield from (item("     - ", reason) for reason in layout.reasons)
        changed = [f"{key}={written(value)}" for key, value in layout.settings.items() if _differs(config, key, layout)]
        if not changed:
            yield "     the layout of the config as it is"
            continue
        settings = textwrap.wrap(" ".join(changed), width() - 7, break_long_words=False, break_on_hyphens=False)
        yield from (f"     {line} \\" for line in settings[:-1])
        yield f"     {settings[-1]}"
    if found and found[0].batches:
        yield ""
        yield item("", "Batch sizes that suit the first layout, as advice, since they change what is learned:")
        yield from (item("  - ", str(advice)) for advice in found[0].batches)


def no_layout(text: str, remedies: Sequence[str]) -> Iterator[RenderableType]:
    """Yield why nothing fits, and each change with which something does."""
    yield item("", text)
    if remedies:
        yield item(
            "", "Each of these changes was tried; the best layout with it leaves the share of a GPU that is given:"
        )
    else:
        tried = "More GPUs, other GPUs, engines over nodes and shorter responses were tried, alone and in pairs"
        yield item("", f"{tried}, and so were smaller models of its generation; none is enough.")
    yield from (item("  - ", remedy) for remedy in remedies)


def _tables(
    config: Config, found: Sequence[Layout], own: tuple[float, float, float] | None
) -> Iterator[RenderableType]:
    """Yield one table of all layouts, or where the page is too narrow several, each with the config's column."""
    rows = [*_rows(config, found, own)]
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    first = 2
    while first < len(widths):
        last = first + 1
        while last < len(widths) and sum(widths[:2]) + sum(widths[first : last + 1]) <= width():
            last += 1
        yield grid(([*row[:2], *row[first:last]] for row in rows), "l" + "r" * (1 + last - first), wrapped=0)
        if last < len(widths):
            yield ""
        first = last


def _rows(config: Config, found: Sequence[Layout], own: tuple[float, float, float] | None) -> Iterator[tuple[str, ...]]:
    """Yield the head, the figures, and a row for each setting in which a layout differs from the config.

    Keys of section parallel stand without it: most are of that section, and their names are long.
    """
    figures = ("does not hold", "", "") if own is None else (f"{own[0]:.1f}", f"{own[1]:,.0f}", percent(own[2]))
    yield "", "config", *map(str, range(1, len(found) + 1))
    yield "seconds of a step", figures[0], *(f"{layout.seconds:.1f}" for layout in found)
    yield "tokens/s/GPU", figures[1], *(f"{layout.tokens_per_s_per_gpu:,.0f}" for layout in found)
    yield "memory left of a GPU", figures[2], *(percent(layout.headroom) for layout in found)
    for key in (key for key in PRINTED if any(_differs(config, key, layout) for layout in found)):
        row = (f"{written(_value(config, key, layout))}{'*' * _differs(config, key, layout)}" for layout in found)
        yield key.removeprefix("parallel."), written(value_of(config, key)), *row


def _value(config: Config, key: str, layout: Layout) -> object:
    return layout.settings.get(key, value_of(config, key))


def _differs(config: Config, key: str, layout: Layout) -> bool:
    return _value(config, key, layout) != value_of(config, key)
