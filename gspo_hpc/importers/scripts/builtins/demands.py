"""Find the variables without which a script ends: it is read as if they were given, to what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
        around, conditions = _condition(statement)
        if around is None:
            continue
        held = {name: reader.scope.get(name) for part in conditions for name in _names(part)}
        empty = [name for name, value in held.items() if not value]
        if not held and (call := next(iter(statements[place + 1 :]), None)) is not None:
            # A function that ends the script where one of its arguments is empty: the call gives it.
            for name in (name for name in _names(call) if not reader.scope.get(name)):
                reader.scope.set(name, demanded(line_of(call)))
            return
        for name in empty or held:
            reader.scope.set(name, demanded(line_of(conditions[0])))
        if held:
            reader.demands.add(around.start_byte)
        return


def passed_in(reader: Reader, node: Node) -> bool:
    """Tell, once, whether an exit has been passed to which this statement leads."""
    if node.start_byte not in reader.demands:
        return False
    reader.demands.discard(node.start_byte)
    return True


def _condition(statement: Node | None) -> tuple[Node | None, list[Node]]:
    """Return the innermost statement that decides whether another one runs, and its conditions."""
    node = statement
    while node is not None and (parent := node.parent) is not None:
        if parent.type == "list" and node == parent.named_children[-1]:
            return parent, [parent.named_children[0]]
        if parent.type == "case_item" and parent.parent is not None:
            return parent.parent, [parent.parent.named_children[0]]
        if parent.type in ("if_statement", "elif_clause", "else_clause"):
            outer = parent if parent.type == "if_statement" else parent.parent
            of = outer if parent.type == "else_clause" else parent
            if of is not None and (conditions := list(_conditions(of))) and node not in conditions:
                return outer, conditions
        node = parent
    return None, []


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
