"""Follow the loops of a shell script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.builtins import required
from gspo_hpc.importers.scripts.expansion.splitting import settled
from gspo_hpc.importers.scripts.parse import line_of, source_of
from gspo_hpc.importers.scripts.scope import REST, Reference, Unknown, Value, is_unset
from gspo_hpc.importers.scripts.words import words_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

State = tuple[dict[str, Value], dict[str, "Node | None"], tuple[str, ...], str, tuple[int, int]]
_ROUNDS = 500  # of one loop
_HEADER = re.compile(r"for\s*\(\((.*?);(.*?);(.*?)\)\)", re.DOTALL)


def follow_loop(reader: Reader, node: Node) -> None:
    """Follow a loop: its commands once, with the variables that change in it unknown; its variables round by round.

    A loop that runs a single time is followed as if it were none.
    """
    loose, reader.loose = reader.loose, 0
    reader.loops += 1
    certain, returns = reader.certain, len(reader.returned)
    try:
        _follow(reader, node)
    finally:
        reader.loops -= 1
        reader.certain = certain and len(reader.returned) == returns and reader.loose < 2
        reader.loose = max(loose, reader.loose - 1)


def _end_round(reader: Reader) -> str:
    """Return what ended a round; what ends loops around this one goes on."""
    ended = reader.ended
    if ended in ("break", "continue"):
        reader.levels -= 1
        reader.ended = ended if reader.levels else ""
        return "break" if reader.levels else ended
    return ended


def _follow(reader: Reader, node: Node) -> None:
    body = node.child_by_field_name("body") or node.named_children[-1]
    certain, values = False, list[str]()
    started = _state(reader)
    name = source_of(node.named_children[0]) if node.type == "for_statement" else ""
    if node.type == "while_statement":
        status = _condition(reader, node, body)
        if status is False:
            return
        changed = [key for key, value in reader.scope.values.items() if started[0].get(key) != value]
        for key in changed:  # as `getopts` and `i++` do: in a later round they have other values
            reader.scope.set(key, Unknown(f"changes in the loop of line {line_of(node)}"))
        certain = bool(status)
    elif name:
        if isinstance(reader.scope.values.get(name), Reference):  # each round makes it stand for another variable
            reader.scope.set(name, Reference(""))
        if node.children[0].type == "select":
            reader.scope.set("REPLY", Unknown(f"is chosen in line {line_of(node)}"))
            _once(reader, node, body, name, False)
            return
        values = _values(reader, node, body)
        if not values:
            return
        certain = not any(map(is_unset, values))
        if len(values) == 1 and certain:
            reader.scope.set(name, values[0])
            reader.walk([body])
            _end_round(reader)
            return
    if node.type != "while_statement":
        started = _state(reader)
    _once(reader, node, body, name, certain)
    ended = _state(reader)
    if not certain and node.type != "c_style_for_statement":
        return
    was, count, loose, left = reader.recording, reader.count, reader.loose, reader.ended
    reader.recording, reader.loose, reader.ended = False, 0, ""
    _begin(reader, started)
    try:
        known = _rounds(reader, node, body, name, values) and not reader.loose
    except ValueError:  # too long, or something that is not followed: the line is told where it is read again
        known = False
    reader.recording, reader.count, reader.loose = was, count, 0 if known else loose
    if not known:
        reader.ended = left
        _begin(reader, ended)


def _state(reader: Reader) -> State:
    scope = reader.scope
    return dict(scope.values), dict(reader.functions), scope.arguments, scope.sourced, reader.option


def _begin(reader: Reader, state: State) -> None:
    scope = reader.scope
    scope.values, reader.functions, scope.arguments, scope.sourced, reader.option = state


def _condition(reader: Reader, node: Node, body: Node) -> bool | None:
    until = node.children[0].type == "until"
    return reader.condition(node.children[1 : node.children.index(body)], until)


def _values(reader: Reader, node: Node, body: Node) -> list[str]:
    """Return what a for loop goes through; a value that is not known is one with a $ in it."""
    if not any(child.type == "in" for child in node.children):
        if not reader.scope.arguments:
            reader.scope.miss("@")
        return list(reader.scope.arguments)
    given = [child for child in node.named_children[1:] if child.id != body.id and child.type != "comment"]
    return settled(word for child in given for word in words_of(child, reader.scope, files=True))


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
    given = scope.arguments
    reader.branches += 1
    left = _round(reader, body)
    first = dict(scope.values)
    changes, lost, started = Unknown(f"changes in the loop of line {line}"), dict[str, Value](), before
    begun = given
    while True:  # until a round changes nothing more: a later one begins with what an earlier one has set
        after = scope.values
        if scope.arguments != given:  # in which of the rounds, and whether there is one, is not known
            scope.arguments = (REST,)
        more = [
            key
            for key in started | after
            if started.get(key) != after.get(key)
            and (key not in lost or not isinstance(lost[key], Unknown | Reference))
            and not (key in lost and scope.goes_on(key, started[key], after.get(key)))
        ]
        if not more and scope.arguments == begun:
            break
        del reader.found[counts[0] :], reader.possible[counts[1] :]
        for key in more:  # a list that only grows keeps what it began with
            grows = key not in lost and scope.goes_on(key, started.get(key), after.get(key))
            kept = scope.growing(key, started[key], after[key], changes.why) if grows else changes
            lost[key] = Reference("") if isinstance(after.get(key), Reference) else kept
        started, begun = before | lost, scope.arguments
        scope.values = dict(started)
        _round(reader, body)
    if lost and not (certain and not reader.loose):
        scope.values = scope.values | started
    reader.branches -= 1
    reader.certain = was
    if left == "exit" and node.type == "while_statement" and required.ends(reader, node, body, before):
        return  # it goes on only where the condition is another one in a run
    if left in ("return", "exit", "done") and certain:  # in the first round, which there is
        reader.ended = left
    elif left == "return":
        reader.returned.append(first)


def _round(reader: Reader, body: Node) -> str:
    """Follow a round of which it is not known which one it is; return what ends it."""
    reader.walk([body])
    ended, reader.ended = reader.ended, ""
    if ended in ("break", "continue"):
        reader.loose = max(reader.loose, reader.levels)
    return ended


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
        if (ended := _end_round(reader)) == "break":
            return True
        if ended in ("return", "exit", "done"):
            return True
        if ended not in ("", "continue") or parts and evaluate(parts[2], reader.scope, line) is None:
            return False
    return bool(name)
