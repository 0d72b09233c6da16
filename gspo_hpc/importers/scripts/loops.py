"""Follow the loops of a shell script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.parse import line_of, source_of
from gspo_hpc.importers.scripts.scope import Unknown, is_unset
from gspo_hpc.importers.scripts.words import expand, fields

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_ROUNDS = 500  # of one loop
_HEADER = re.compile(r"for\s*\(\((.*?);(.*?);(.*?)\)\)", re.DOTALL)


def follow_loop(reader: Reader, node: Node) -> None:
    """Follow a loop: its commands once, with the variables that change in it unknown; its variables round by round.

    A loop that runs a single time is followed as if it were none.
    """
    body = node.child_by_field_name("body") or node.named_children[-1]
    certain, values = False, list[str]()
    name = source_of(node.named_children[0]) if node.type == "for_statement" else ""
    if node.type == "while_statement":
        status = _condition(reader, node, body)
        if status is False:
            return
        certain = bool(status)
    elif name:
        values = _values(reader, node, body)
        if not values:
            return
        certain = not any(map(is_unset, values))
        if len(values) == 1 and certain:
            reader.scope.set(name, values[0])
            reader.walk([body])
            reader.ended = "" if reader.ended in ("break", "continue") else reader.ended
            return
    started = dict(reader.scope.values), dict(reader.functions), reader.scope.arguments
    _once(reader, node, body, name, certain)
    ended = dict(reader.scope.values), dict(reader.functions), reader.scope.arguments
    if not certain and node.type != "c_style_for_statement":
        return
    was, count, loose = reader.recording, reader.count, reader.loose
    reader.recording, reader.loose = False, False
    reader.scope.values, reader.functions, reader.scope.arguments = started
    try:
        known = _rounds(reader, node, body, name, values) and not reader.loose
    except ValueError:  # too long, or something that is not followed: the line is told where it is read again
        known = False
    reader.recording, reader.count, reader.loose, reader.ended = was, count, loose, ""
    if not known:
        reader.scope.values, reader.functions, reader.scope.arguments = ended


def _condition(reader: Reader, node: Node, body: Node) -> bool | None:
    until = node.children[0].type == "until"
    return reader.condition(node.children[1 : node.children.index(body)], until)


def _values(reader: Reader, node: Node, body: Node) -> list[str]:
    """Return what a for loop goes through; a value that is not known is one with a $ in it."""
    if not any(child.type == "in" for child in node.children):
        return list(reader.scope.arguments)
    given = [child for child in node.named_children[1:] if child.id != body.id and child.type != "comment"]
    return [word for child in given for word in fields(expand(child, reader.scope))]


def _once(reader: Reader, node: Node, body: Node, name: str, certain: bool) -> None:
    """Follow the body as any of its rounds: variables that change in it are unknown in it and after it."""
    line, scope = line_of(node), reader.scope
    several = Unknown(f"takes several values in the loop of line {line}")
    if match := _HEADER.match(source_of(node)):
        name = match[1].partition("=")[0].strip()
    if name.isidentifier():
        scope.set(name, several)
    before, counts, was = dict(scope.values), (len(reader.found), len(reader.possible)), reader.certain
    reader.certain = was and certain
    reader.walk([body])
    reader.ended = ""
    after = scope.values
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    if changed:  # a later round begins with what an earlier one has set
        del reader.found[counts[0] :], reader.possible[counts[1] :]
        scope.values = before | {key: Unknown(f"changes in the loop of line {line}") for key in changed}
        started = dict(scope.values)
        reader.walk([body])
        reader.ended = ""
        scope.values = scope.values if certain else scope.values | started
    reader.certain = was


def _rounds(reader: Reader, node: Node, body: Node, name: str, values: list[str]) -> bool:
    """Follow all rounds; return whether they are all known."""
    header = _HEADER.match(source_of(node))
    parts = [re.sub(r"\$\{?(\w+)\}?", r"\1", part) for part in header.groups()] if header else []
    line = line_of(node)
    if parts:
        if evaluate(parts[0], reader.scope, line) is None:
            return False
    elif not name:
        values = [""] * _ROUNDS
    for value in values if not parts else [""] * _ROUNDS:
        if name:
            reader.scope.set(name, value)
            held: bool | None = True
        else:
            found = evaluate(parts[1], reader.scope, line) if parts else None
            held = (None if found is None else found != 0) if parts else _condition(reader, node, body)
        if not held:
            return held is False
        reader.walk([body])
        ended, reader.ended = reader.ended, ""
        if ended == "break":
            return True
        if ended not in ("", "continue") or parts and evaluate(parts[2], reader.scope, line) is None:
            return False
    return bool(name)
