"""Follow a mapping that a Python file makes and changes step by step before it gives it to a call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from gspo_hpc.importers.texts.constants import Constants, as_code, is_code
from gspo_hpc.importers.texts.syntax import Tree, called


class _Change(NamedTuple):
    """Names that a statement gives a value, or takes out."""

    statement: ast.stmt
    values: dict[str, Any]
    gone: tuple[str, ...] = ()


def built(known: Constants, node: ast.expr) -> dict[str, Any] | None:
    """Return what a mapping of a variable holds where it is given to a call, None if that is not plain.

    It is made once in the same function and changed by update, by subscripts and by pop alone. A name that a condition
    may change is $(code).
    """
    tree = known.tree
    binding = _binding(tree, node)
    statement = None if binding is None else tree.parent(binding)
    if not isinstance(node, ast.Name) or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return None
    made = statement.value
    if not isinstance(made, ast.Dict) and not (isinstance(made, ast.Call) and called(made) == "dict"):
        return None
    found = known.mapping(made)
    if found is None or not _before(tree, statement, node):
        return None
    changes: list[_Change] = []
    for use in tree.scopes.loads.get(tree.variable(node), ()):
        if use is node:
            continue
        change = _change(known, use)
        if change is None and not known.harmless(use, True, set()):
            return None
        if change is not None:
            if tree.function_of(use) is not tree.function_of(node):
                return None
            changes.append(change)
    for change in sorted(changes, key=lambda one: one.statement.lineno):
        again = tree.looped(change.statement) or tree.looped(node)
        if change.statement.lineno > node.lineno and not again:
            continue
        certain = not again and _before(tree, change.statement, node)
        for name, value in change.values.items():
            same = name in found and found[name] == value and not is_code(value)
            text = f"{name}={value.removeprefix('$(').removesuffix(')') if is_code(value) else value}"
            if not same:
                found[name] = value if certain else as_code(f"{text} in line {change.statement.lineno}")
        for name in change.gone:
            if certain:
                found.pop(name, None)
            elif name in found:
                found[name] = as_code(f"{name} may be taken out in line {change.statement.lineno}")
    return found


def _binding(tree: Tree, node: ast.expr) -> ast.AST | None:
    """Return the one place that gives a variable its value, in the same function, None if there is no such place."""
    bindings = tree.scopes.bindings.get(tree.variable(node), []) if isinstance(node, ast.Name) else []
    same = len(bindings) == 1 and tree.function_of(bindings[0]) is tree.function_of(node)
    above = tree.parent(bindings[0]) if same else None
    alone = isinstance(above, ast.AnnAssign) or (isinstance(above, ast.Assign) and above.targets == bindings)
    return bindings[0] if alone else None


def _change(known: Constants, use: ast.expr) -> _Change | None:
    """Return what is changed where the name of a mapping stands, None if nothing is, or it is not told what."""
    tree, above = known.tree, known.tree.parent(use)
    outer = None if above is None else tree.parent(above)
    if isinstance(above, ast.Subscript) and above.value is use:
        key = known.value(above.slice)
        if not isinstance(key, str) or is_code(key):
            return None
        if isinstance(outer, ast.Assign) and above in outer.targets:
            return _Change(outer, {key: known.value(outer.value)})
        if isinstance(outer, ast.AugAssign) and above is outer.target:
            return _Change(outer, {key: as_code(outer)})
        return _Change(outer, {}, (key,)) if isinstance(outer, ast.Delete) else None
    statement = tree.parent(outer) if isinstance(above, ast.Attribute) and isinstance(outer, ast.Call) else None
    if not isinstance(outer, ast.Call) or outer.func is not above:
        return None
    if called(outer) == "update" and isinstance(statement, ast.Expr):
        pairs = [*_pairs(known, outer)]
        return None if None in pairs else _Change(statement, {name: value for name, value in filter(None, pairs)})
    if called(outer) == "pop" and isinstance(statement, ast.Expr | ast.Assign) and outer.args:
        key = known.value(outer.args[0])
        return _Change(statement, {}, (key,)) if isinstance(key, str) and not is_code(key) else None
    return None


def _pairs(known: Constants, call: ast.Call) -> Iterator[tuple[str, Any] | None]:
    """Yield the names and values that update is given, None where they are not told."""
    for node in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is None)):
        more = known.mapping(node)
        yield from (None,) if more is None else more.items()
    yield from ((keyword.arg, known.value(keyword.value)) for keyword in call.keywords if keyword.arg is not None)


def _before(tree: Tree, statement: ast.stmt, node: ast.AST) -> bool:
    """Tell whether a statement has run whenever a node of the same function does."""
    holder = tree.parent(statement)
    below, above = node, tree.parent(node)
    while above is not None and above is not holder:
        below, above = above, tree.parent(above)
    if above is None:
        return False
    bodies = [body for _, body in ast.iter_fields(above) if isinstance(body, list) and statement in body]
    return any(below in body and body.index(statement) < body.index(below) for body in bodies)
