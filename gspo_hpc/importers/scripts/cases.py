"""Follow the case statements of a shell script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.importers.scripts.conditions import fits, plain, plain_pattern
from gspo_hpc.importers.scripts.parse import line_of, source_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_MOST = 64  # ways through one statement


class Item(NamedTuple):
    """One ``pattern) commands`` of a case statement."""

    matched: bool | None  # None: not known before the script runs
    body: list[Node]
    end: str  # ;; ends the statement, ;& goes on with the next commands, ;;& with the next patterns


def follow_case(reader: Reader, node: Node) -> None:
    """Follow the commands that a case statement chooses, or all that it may choose."""
    ways = list(_ways(list(_items(reader, node)), node))
    if len(ways) == 1:
        reader.walk(ways[0])
    else:
        reader.alternatives(ways, line_of(node))


def _items(reader: Reader, node: Node) -> Iterator[Item]:
    subject = plain(node.named_children[0], reader.scope)
    goes_on = False  # the commands of an item may set what a later pattern is made of
    for item in (child for child in node.named_children if child.type == "case_item"):
        closed = next(number for number, child in enumerate(item.children) if child.type == ")")
        known = [plain_pattern(pattern, reader.scope) for pattern in item.children[:closed] if pattern.is_named]
        matched: bool | None = "*" in known
        if not matched:
            extended = reader.scope.mark("option", "extglob")
            found = [None if subject is None or pattern is None else fits(subject, pattern, reader.scope, extended)
                     for pattern in known]  # fmt: skip
            matched = True if True in found else None if None in found else False
            if goes_on and any("$" in source_of(pattern) for pattern in item.children[:closed]):
                matched = None
        goes_on = goes_on or (item.children[-1].type == ";;&" and matched is not False)
        yield Item(matched, item.children[closed + 1 :], item.children[-1].type)


def _ways(items: Sequence[Item], node: Node) -> Iterator[list[Node]]:
    """Yield the commands of each way through the statement. Raises ValueError if there are absurdly many."""
    open_ways: list[tuple[int, list[Node]]] = [(0, [])]  # the item whose pattern is compared next, what ran so far
    count = 0
    while open_ways:
        at, body = open_ways.pop()
        count += 1
        if count > _MOST:
            raise ValueError(f"line {line_of(node)}: more than {_MOST} ways through this case")
        while at < len(items) and items[at].matched is False:
            at += 1
        if at == len(items):
            yield body
            continue
        if items[at].matched is None:
            open_ways.append((at + 1, body))
        ran = [*body, *items[at].body]
        while items[at].end == ";&" and at + 1 < len(items):
            at += 1
            ran += items[at].body
        open_ways.append((at + 1 if items[at].end == ";;&" else len(items), ran))
