"""Parts of a page, which rich lays out, and the page as lines.

rich is imported here. Commands import this file, and the pages that need it, only to print for a person.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gspo_hpc.system.terminal import coloured, pasteable
from gspo_hpc.system.text import printable

_NARROWEST, _WIDEST = 60, 120  # columns of a page
_LEAST_PROSE = 12  # columns that a text keeps beside other columns, however narrow the page

Span = str | tuple[str, str]  # a text, or a text and its style


def width() -> int:
    """Return the width of a page: the terminal's, from 60 to 120 columns; 120 into a pipe or a file."""
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def lines(parts: Iterable[RenderableType], stream: TextIO | None = None) -> Iterator[str]:
    """Yield the lines of a page for `stream` (None: standard output), without spaces at their ends.

    A str is a finished line, and no line of a Text is broken; anything else is laid out to fit the width of a page.
    Nothing is written to `stream`: rich would end the program if it were a closed pipe.
    """
    ours = _console(stream or sys.stdout)
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        if isinstance(part, Text) and ours.color_system is None:  # as it is, without rich's machinery
            yield from (line.rstrip(" ") for line in part.plain.split("\n"))
            continue
        ours.file = io.StringIO()
        ours.print(part, crop=False, soft_wrap=isinstance(part, Text))
        yield from (line.rstrip(" ") for line in ours.file.getvalue().removesuffix("\n").split("\n"))


def _shown(text: str) -> str:
    """Return a text that moves no cursor, and whose commands can be pasted."""
    return pasteable(printable(text))


def _console(stream: TextIO) -> Console:
    """Return a console that prints text as it is, in colour only if `stream` shows it."""
    return Console(
        width=width(),
        force_terminal=stream.isatty(),
        color_system="standard" if coloured(stream) else None,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


def show(parts: Iterable[RenderableType]) -> None:
    """Print a page to standard output."""
    for line in lines(parts):
        print(line)


def text(*spans: Span) -> Text:
    """Return a line that is never broken, however long: it has a path in it, or is short."""
    cleaned = (_shown(span) if isinstance(span, str) else (_shown(span[0]), span[1]) for span in spans)
    return Text.assemble(*cleaned)


def item(head: str | Text, prose: str) -> Text:
    """Return a head, and a text beside it that is wrapped below its own first line.

    rich would break or cut a word that no line can hold. textwrap lets it overflow: a path can be copied in one piece.
    """
    first = text(head) if isinstance(head, str) else head
    room = max(width() - first.cell_len, _NARROWEST // 2)
    wrapped = textwrap.wrap(_shown(prose), room, break_long_words=False, break_on_hyphens=False)
    return Text.assemble(first, ("\n" + " " * first.cell_len).join(wrapped))


def grid(
    rows: Iterable[Sequence[RenderableType]], align: str = "", *, wrapped: int = 1, first: int = 0
) -> Table | Text:
    """Return rows as aligned columns without lines between them, two spaces from the edge and from each other.

    `align` has a letter for each column, l or r (default: l). The last `wrapped` columns give way where the page is
    narrow; all others stay whole. `first` is the least width of the first column.
    """
    cleaned = [[_shown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if (whole := _whole(cleaned, align, first)) is not None:
        return whole
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    columns = list(zip(*cleaned, strict=True))
    for number, (cells, side) in enumerate(zip(columns, align.ljust(len(columns), "l"), strict=True)):
        gives_way = number >= len(columns) - wrapped
        least = max((cell_len(cell) for cell in cells if isinstance(cell, str)), default=0)
        table.add_column(
            justify="right" if side == "r" else "left",
            no_wrap=not gives_way,
            overflow="fold",  # nothing is ever lost
            min_width=max(min(least, _LEAST_PROSE) if gives_way else least, 0 if number else first),
        )
    for row in cleaned:
        table.add_row(*row)
    needed = sum(2 + (column.min_width or 0) for column in table.columns)
    table.width = needed if needed > width() else None  # it overflows: rich would drop what finds no room
    return table


def _whole(rows: Sequence[Sequence[RenderableType]], align: str, first: int) -> Text | None:
    """Return rows of plain text that fit the page as they are; None for others, which rich has to lay out.

    It looks like rich's table, which takes several times as long: most tables of a page are of this kind.
    """
    plain = [[cell for cell in row if isinstance(cell, str) and cell.isascii() and "\n" not in cell] for row in rows]
    if list(map(len, plain)) != list(map(len, rows)):
        return None
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    widths[:1] = [max(one, first) for one in widths[:1]]
    if sum(2 + one for one in widths) > width():
        return None
    sides = align.ljust(len(widths), "l")
    return Text(
        "\n".join(
            "".join(
                f"  {cell.rstrip():>{room}}" if side == "r" else f"  {cell:<{room}}"
                for cell, room, side in zip(row, widths, sides, strict=True)
            )
            for row in plain
        )
    )
