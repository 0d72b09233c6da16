"""Find the variables without which a script ends: it is read as if they were given.

What they are given is not known, unless the script goes on with one value alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins import required
from gspo_hpc.importers.scripts.parse import line_of, nodes, source_of
from gspo_hpc.importers.scripts.scope import demanded

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader


def passed(reader: Reader) -> None:
    """Note an exit that ends nothing, since what follows it is read: its condition does not hold in a run.

    The variables in the condition are then others than the script alone would make them: those that are empty, as in
    ``[ -z "$MODEL" ] && exit 1``, or else all of them.
    """
    if not reader.certain:
        return
    statements = (reader.statement, *reversed(reader.callers))
    for place, statement in enumerate(statements):
        around, conditions, holds = _condition(statement)
        if around is None:
            continue
        held = {name: reader.scope.get(name) for part in conditions for name in _names(part)}
        empty = [name for name, value in held.items() if not value]
        known = len(conditions) == 1 and holds is not None
        values = required.of([(conditions[0], bool(holds))], reader.scope) if known else {}
        if not held and (call := next(iter(statements[place + 1 :]), None)) is not None:
            _passed_to(reader, call, values)
            return
        line = line_of(conditions[0])
        _given(reader, [*(empty or held), *(name for name in values if name not in held)], values, line)
        if held or values:
            reader.demands.add(around.start_byte)
        return


def _given(reader: Reader, names: Iterable[str], values: required.Values, line: int) -> None:
    """Set variables that a run of the script is given: to their one value, or to what is not known."""
    for name in dict.fromkeys((*names, *(name for name, found in values.items() if len(found) == 1))):
        if len(values.get(name, ())) == 1:
            required.give(reader, name, values[name][0], line)
        elif not name.isdecimal():
            reader.scope.set(name, demanded(line, values.get(name, ())))


def _passed_to(reader: Reader, call: Node, values: required.Values) -> None:
    """Set what a call gives a function that ends the script unless its arguments are what it demands.

    `values`: what its arguments may be, by their numbers.
    """
    _, *words = call.named_children
    theirs: required.Values = {}
    for place, word in enumerate(words, 1):
        if (name := required.variable(word)) and str(place) in values:
            theirs[name] = values[str(place)]
    names = [name for name in _names(call) if not reader.scope.get(name)]
    _given(reader, names, {name: found for name, found in theirs.items() if name in names}, line_of(call))


def passed_in(reader: Reader, node: Node) -> bool:
    """Tell, once, whether an exit has been passed to which this statement leads."""
    if node.start_byte not in reader.demands:
        return False
    reader.demands.discard(node.start_byte)
    return True


def _condition(statement: Node | None) -> tuple[Node | None, list[Node], bool | None]:
    """Return the innermost statement that decides whether another one runs, and its conditions.

    Also whether these have to hold for the other one not to run, None if that is not plain.
    """
    node = statement
    while node is not None and (parent := node.parent) is not None:
        if parent.type == "list" and node == parent.named_children[-1]:
            return parent, [parent.named_children[0]], parent.children[1].type == "||"
        if parent.type == "case_item" and parent.parent is not None:
            return parent.parent, [parent.parent.named_children[0]], None
        if parent.type == "while_statement" and node == parent.named_children[-1]:
            given = [child for child in parent.named_children[:-1] if child.type != "comment"]
            return parent, given, parent.children[0].type == "until"
        if parent.type in ("if_statement", "elif_clause", "else_clause"):
            outer = parent if parent.type == "if_statement" else parent.parent
            of = outer if parent.type == "else_clause" else parent
            if of is not None and (conditions := list(_conditions(of))) and node not in conditions:
                several = any(child.type == "elif_clause" for child in (outer or of).children)
                return outer, conditions, None if several else parent.type == "else_clause"
        node = parent
    return None, [], None


def _conditions(node: Node) -> Iterator[Node]:
    """Yield what stands before `then`."""
    for child in node.named_children:
        if child.next_sibling is not None and child.start_byte < _then(node):
            yield child


def _then(node: Node) -> int:
    return next((child.start_byte for child in node.children if child.type == "then"), 0)


def _names(node: Node) -> Iterator[str]:
    """Yield the variables whose values a condition has."""
    for part in nodes(node):
        if part.type in ("simple_expansion", "expansion"):
            for child in part.named_children:
                name = source_of(child.named_children[0] if child.type == "subscript" else child)
                if child.type in ("variable_name", "subscript") and name.isidentifier():
                    yield name
