"""The pages of the documentation, and what tests look for in them: commands, settings, files, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for folder, pattern in ((".", "*.md"), ("docs", "**/*.md"), ("slurm", "*.md"), ("tools", "**/*.md"))
    for path in (PROJECT / folder).glob(pattern)
    if path.name != "CHANGELOG.md"  # it speaks of names that are gone
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?:    \S.*\n)+")
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[([^]]*)\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?(gspo-hpc|python|bash) (\S.*)")
_SHELL = ("bash", "console", "")


def name_of(page: Path) -> str:
    """Return the path of a page below the project."""
    return page.relative_to(PROJECT).as_posix()


def prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return _INDENTED.sub("", _FENCED.sub("", text))


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return [block for kind, block in _FENCED.findall(text) if kind == language]


def spans(text: str) -> list[str]:
    """Return what stands in backticks within sentences and tables, each on one line."""
    return [" ".join(span.split()) for span in _SPAN.findall(prose(text))]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield (program, its arguments) of every command that a text shows: gspo-hpc, python or bash."""
    blocks = [block for kind, block in _FENCED.findall(text) if kind in _SHELL] + _INDENTED.findall(text)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    for line in [*lines, *spans(text)]:
        for part in re.split(r"\s\|\s|\s&&\s|;\s", re.sub(r"\s+#.*", "", line.strip())):
            if found := _COMMAND.fullmatch(part):
                yield found[1], found[2]


def links(text: str) -> list[str]:
    """Return the targets of all links and pictures."""
    return [target for _, target in _LINK.findall(prose(text))]


def cells(text: str) -> Iterator[str]:
    """Yield the cells of all tables as a reader sees them: of a link only its text."""
    for line in prose(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in _LINK.sub(r"\1", line).strip("|").split("|"))


def anchors(text: str) -> set[str]:
    """Return what links may name behind #: the headings, as GitHub writes them."""
    heads = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", head).lower()).replace(" ", "-") for head in heads}
