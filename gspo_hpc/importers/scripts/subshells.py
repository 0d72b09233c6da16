"""Follow what a shell script runs in shells of their own: ( ), pipelines and background jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.parse import GROUP, line_of, source_of
from gspo_hpc.importers.scripts.scope import Value

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader


def is_job(node: Node) -> bool:
    """Tell whether a statement ends with &."""
    return node.next_sibling is not None and node.next_sibling.type == "&"


def in_background(reader: Reader, node: Node) -> bool:
    """Follow a statement that ends with &, which succeeds at once."""
    with _shell_of_its_own(reader):
        reader.run(node)
    return True


def apart(reader: Reader, nodes: Sequence[Node], values: dict[str, Value] | None = None) -> bool | None:
    """Follow statements of a shell of their own; return whether the last one succeeds, None if that is not known."""
    if nodes and source_of(nodes[0]) == GROUP:  # it is the shell that is followed
        return reader.walk(nodes[1:])
    with _shell_of_its_own(reader):
        if values is not None:
            reader.scope.values = values
        status = reader.walk(nodes)
        return None if reader.ended else status


@contextmanager
def _shell_of_its_own(reader: Reader) -> Iterator[None]:
    """Keep what is set meanwhile from lasting, and exit, return and break from ending more than that."""
    scope = reader.scope
    before, functions, returned = dict(scope.values), dict(reader.functions), reader.returned
    kept = scope.arguments, scope.reset, scope.sourced, dict(scope.trapped)
    state = reader.option, reader.last_apart, reader.loose, list(reader.handlers), reader.frames
    over = reader.over
    reader.frames = [None if frame is None else dict(frame) for frame in reader.frames]
    reader.returned = []
    yield
    scope.values, reader.functions, reader.returned = before, functions, returned
    scope.arguments, scope.reset, scope.sourced, scope.trapped = kept
    reader.option, reader.last_apart, reader.loose, reader.handlers, reader.frames = state
    reader.ended, reader.over = "", over


def pipeline(reader: Reader, node: Node) -> bool | None:
    """Follow the parts of a pipeline, of which each has its own shell, but the last one with ``shopt -s lastpipe``."""
    *parts, last = [child for child in node.named_children if child.type != "comment"]
    done = [apart(reader, [part]) for part in parts]
    fails = reader.scope.mark("option", "pipefail")
    if reader.last_apart:
        return _status(done, apart(reader, [last]), fails)
    before = dict(reader.scope.values)
    status = reader.run(last)
    if reader.last_apart is None:
        why = f"depends on lastpipe in line {line_of(node)}, of which it is not known whether it is set"
        reader.scope.join([reader.scope.values, before], why)
    return _status(done, status, fails)


def _status(parts: list[bool | None], last: bool | None, fails: bool | None) -> bool | None:
    """Return whether a pipeline succeeds: as its last part does, or as all do with ``set -o pipefail``."""
    every = False if False in (*parts, last) else None if None in (*parts, last) else True
    return last if fails is False or last == every else every if fails else None
