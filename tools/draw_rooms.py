"""Draw the rooms of the package and the imports between them: docs/rooms.svg, the picture in ARCHITECTURE.md.

    python tools/draw_rooms.py           # write it
    python tools/draw_rooms.py --check   # write nothing; exit with 1 if the picture is out of date

Rows are the layers of setup.cfg, boxes the rooms with the first line of their `__init__.py`, arrows what the code
imports. An arrow is left out if a longer path connects the same rooms: otherwise nine in ten would hide the rest. The
rooms on the user's side are on the left, those that train on the right, and those that both use below them.
"""

from __future__ import annotations

import ast
import configparser
import itertools
import sys
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import generated
import grimp

PROJECT = Path(__file__).resolve().parents[1]
_WIDTH, _BOX, _ROW, _GAP, _MARGIN, _AISLE, _SHARED = 1240, 62, 96, 12, 12, 44, 640  # pixels


def layers() -> list[list[str]]:
    """The rooms, by layer, from the top."""
    parser = configparser.ConfigParser()
    parser.read(PROJECT / "setup.cfg", encoding="utf-8")
    lines = parser["importlinter:contract:rooms"]["layers"].strip().splitlines()
    return [[room.strip() for room in line.replace("|", ":").split(":")] for line in lines]


def job(room: str) -> str:
    """Return what a room says that it is for."""
    text = (PROJECT / "gspo_hpc" / room / "__init__.py").read_text("utf-8")
    found = ast.get_docstring(ast.parse(text))
    assert found, f"gspo_hpc/{room}/__init__.py has no docstring"
    return found.splitlines()[0].removesuffix(".")


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports from, directly."""
    graph = grimp.build_graph("gspo_hpc", cache_dir=None)
    found: dict[str, set[str]] = {room: set() for row in layers() for room in row}
    for module in graph.modules:
        room = module.split(".")[1] if "." in module else ""
        for other in graph.find_modules_directly_imported_by(module):
            target = other.split(".")[1] if "." in other else ""  # gspo_hpc itself is no room
            if room in found and target in found and target != room:
                found[room].add(target)
    return found


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same without every arrow that a longer way stands for."""

    def below(room: str) -> set[str]:
        return edges[room].union(*(below(other) for other in edges[room])) if edges[room] else set()

    return {room: {one for one in to if not any(one in below(two) for two in to - {one})} for room, to in edges.items()}


def rows() -> list[list[list[str]]]:
    """Rooms of each row: of the user's side and of what trains, or of what both use."""
    parser = configparser.ConfigParser()
    parser.read(PROJECT / "setup.cfg", encoding="utf-8")
    light = {name.split(".")[1] for name in parser["importlinter:contract:user_side"]["source_modules"].split()}
    shared_from = next(number for number, row in enumerate(layers()) if "planning" in row)
    above, shared = layers()[:shared_from], layers()[shared_from:]
    left = [found for row in above if (found := [room for room in row if room in light])]
    right = [found for row in above if (found := [room for room in row if room not in light])]
    empty: list[str] = []
    both = [[one, two] for one, two in itertools.zip_longest(left, right, fillvalue=empty)]
    return [*both, *([row] for row in shared)]


def picture() -> str:
    """The SVG."""
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    whole = _WIDTH - 2 * _MARGIN
    for number, sides in enumerate(rows()):
        side = (whole - _AISLE) / 2 if len(sides) == 2 else _SHARED
        begin = _MARGIN if len(sides) == 2 else (_WIDTH - side) / 2
        for at_side, found in enumerate(sides):
            width = (side - _GAP * (len(found) - 1)) / max(1, len(found))
            for at, room in enumerate(found):
                left = begin + at_side * (side + _AISLE) + at * (width + _GAP)
                places[room] = (left, _MARGIN + number * _ROW, width)
    height = 2 * _MARGIN + (len(rows()) - 1) * _ROW + _BOX
    return "\n".join([*_head(height), *_arrows(reduced(imports()), places), *_boxes(places), "</svg>", ""])


def _head(height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-label="Rooms of gspo_hpc, by layer, and what they import" font-family="sans-serif">'
    )
    yield (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7a828c"/></marker></defs>'
    )
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#fbfaf8"/>'


def _arrows(edges: Mapping[str, set[str]], places: Mapping[str, tuple[float, float, float]]) -> Iterator[str]:
    """Curves from the bottom of a box to the top of another, spread over both, so that no two share an end."""
    incoming = {room: sorted((r for r in edges if room in edges[r]), key=lambda r: (places[r][0], r)) for room in edges}
    for room, to in edges.items():
        left, top, width = places[room]
        targets = sorted(to, key=lambda other: (places[other][0], other))
        for number, other in enumerate(targets):
            begin = left + width * (number + 1) / (len(targets) + 1)
            target_left, target_top, target_width = places[other]
            sources = incoming[other]
            end = target_left + target_width * (sources.index(room) + 1) / (len(sources) + 1)
            y, bend = top + _BOX, (target_top - top - _BOX) / 2
            yield (
                f'<path d="M{begin:.0f} {y:.0f}C{begin:.0f} {y + bend:.0f} {end:.0f} {target_top - bend:.0f} '
                f'{end:.0f} {target_top - 1:.0f}" fill="none" stroke="#7a828c" stroke-width="1.3" '
                'marker-end="url(#a)"/>'
            )


def _boxes(places: Mapping[str, tuple[float, float, float]]) -> Iterator[str]:
    for room, (left, top, width) in places.items():
        middle = left + width / 2
        yield (
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{_BOX}" rx="6" fill="#ffffff" '
            'stroke="#2a5d9f" stroke-width="1.4"/>'
        )
        yield (
            f'<text x="{middle:.0f}" y="{top + 17:.0f}" text-anchor="middle" font-size="14" font-weight="700" '
            f'fill="#1d2126">{escape(room)}</text>'
        )
        lines = textwrap.wrap(job(room), int(width / 5.2))
        for number, line in enumerate(lines):
            y = top + (39.0, 34.0, 31.0)[len(lines) - 1] + 12 * number
            yield (
                f'<text x="{middle:.0f}" y="{y:.0f}" text-anchor="middle" font-size="10.5" fill="#4b525b">'
                f"{escape(line)}</text>"
            )


if __name__ == "__main__":
    sys.exit(generated.main("draw_rooms", __doc__, {"rooms.svg": lambda _: picture()}))
