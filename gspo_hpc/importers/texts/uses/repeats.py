"""Find out whether a Python file trains several times: in a loop, or by a function that it calls more than once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers.texts.objects import ObjectMap
from gspo_hpc.importers.texts.scopes import FUNCTIONS
from gspo_hpc.importers.texts.syntax import Function, Tree, called, shown

_DEEPEST = 12  # calls within each other that are followed
_Loop = ast.For | ast.AsyncFor | ast.While | ast.comprehension
_Branch = ast.If | ast.IfExp | ast.BoolOp | ast.Try | ast.ExceptHandler | ast.match_case
_PAIRED = ("enumerate", "list", "tuple", "sorted", "reversed", "tqdm")
_LEAVES = ("exit", "_exit", "quit")


class _Several(NamedTuple):
    """Reason why a file trains several times."""

    where: str  # the lines, and what stands there
    sure: bool  # it does so whenever the file runs


def several(tree: Tree, objects: ObjectMap, value: Callable[[ast.expr], Any]) -> str:
    """Return where a file may train several times, as a sentence, "" if it trains once.

    `value` evaluates an expression. Raises ValueError where it trains several times for certain.
    """
    trains = [call for call in tree.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "train"
              and any(item.kind == "trainer" for item in objects.of(call.func.value))]  # fmt: skip
    found = [one for call in trains or objects.trainers() for one in _repeats(tree, call, value, 0, True)]
    found += _pairs(tree, trains, True)
    for one in found:
        if one.sure:
            raise ValueError(f"{one.where}, so it starts several runs: leave one in the file")
    return f"{found[0].where} if the file gets there: this is one run of these" if found else ""


def _repeats(tree: Tree, node: ast.AST, value: Callable[[ast.expr], Any], depth: int, sure: bool) -> Iterator[_Several]:
    """Yield what makes a node run several times. `sure`: it runs whenever the function does that it stands in."""
    below, above = node, tree.parent(node)
    while above is not None and not isinstance(above, FUNCTIONS):
        for loop in _loops(above, below):
            most = None if isinstance(loop, ast.While) else _turns(loop.iter, value)
            if most is None or most > 1:
                always = sure and most is not None and not _is_left(loop) and _runs(tree, above)
                yield _Several(f"line {_line(loop)}: {_head(loop)}: it trains in each turn of this loop", always)
                return
        sure = sure and not (isinstance(above, _Branch) and not _is_main(above))
        below, above = above, tree.parent(above)
    if not isinstance(above, Function) or depth > _DEEPEST:
        return
    sites = list(_sites(tree, above))
    for site in sites:
        yield from _repeats(tree, site, value, depth + 1, sure)
    yield from _pairs(tree, sites, sure)


def _pairs(tree: Tree, calls: Sequence[ast.Call], sure: bool) -> Iterator[_Several]:
    """Yield the first two calls of a function that may both run, if there are such."""
    for number, one in enumerate(calls):
        for other in calls[number + 1 :]:
            if tree.function_of(one) is tree.function_of(other) and not _is_either(tree, one, other):
                both = f"lines {one.lineno} and {other.lineno}: {shown(one)} and {shown(other)}: both train"
                yield _Several(both, sure and _runs(tree, one) and _runs(tree, other))
                return


def _loops(above: ast.AST, below: ast.AST) -> Sequence[_Loop]:
    """Return the loops in each turn of which a part of a statement or an expression runs."""
    if isinstance(above, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return () if below in above.generators else above.generators
    if isinstance(above, ast.For | ast.AsyncFor):
        return [above] if below in above.body else ()
    return [above] if isinstance(above, ast.While) and below not in above.orelse else ()


def _runs(tree: Tree, node: ast.AST, depth: int = 0) -> bool:
    """Tell whether a node is known to run whenever the file does."""
    if not tree.certain(node) or depth > _DEEPEST:
        return False
    function = tree.function_of(node)
    if not isinstance(function, Function):
        return function is None
    sites = [*_sites(tree, function)]
    return not sites or any(_runs(tree, site, depth + 1) for site in sites)


def _turns(given: ast.expr, value: Callable[[ast.expr], Any]) -> int | None:
    """Return how many turns a loop over an expression has, None if that is not known."""
    if isinstance(given, ast.Call) and called(given) in _PAIRED and given.args:
        return _turns(given.args[0], value)
    if isinstance(given, ast.Call) and called(given) in ("items", "keys", "values") and not given.args:
        return _turns(given.func.value, value) if isinstance(given.func, ast.Attribute) else None
    if isinstance(given, ast.Call) and called(given) == "range":
        limits = [value(item) for item in given.args]
        plain = 0 < len(limits) < 4 and all(isinstance(item, int) for item in limits)
        return len(range(*limits)) if plain and 0 not in limits[2:] else None
    if isinstance(given, ast.List | ast.Tuple | ast.Set):
        return None if any(isinstance(item, ast.Starred) for item in given.elts) else len(given.elts)
    held = value(given)
    return len(held) if isinstance(held, list | tuple | dict) else None


def _is_left(loop: _Loop) -> bool:
    """Tell whether something in the body of a loop may leave it before its last turn."""
    left: list[ast.AST] = [] if isinstance(loop, ast.comprehension) else [*loop.body]
    while left:
        node = left.pop()
        if isinstance(node, ast.Break | ast.Return) or _exits(node):
            return True
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            left += ast.iter_child_nodes(node)
    return False


def _exits(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node) in _LEAVES


def _sites(tree: Tree, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    """Yield the calls of a function of the file; of the method __init__, those that make an object."""
    for call in tree.calls:
        if tree.defined(call)[0] is function:
            yield call


def _is_either(tree: Tree, one: ast.AST, other: ast.AST) -> bool:
    """Tell whether of two nodes of a function only one runs, or whether they stand in one expression."""
    first, second = (list(_path(tree, node)) for node in (one, other))
    common = next(node for node in first if node in second)
    before, behind = (path[path.index(common) - 1] if path.index(common) else common for path in (first, second))
    if isinstance(common, ast.If | ast.IfExp | ast.Try | ast.Match):
        return _part(common, before) != _part(common, behind)
    if isinstance(common, ast.expr):
        return False
    lines = sorted((before, behind), key=_line)
    return isinstance(lines[0], ast.If | ast.Try | ast.With) and _ends(lines[0].body)


def _path(tree: Tree, node: ast.AST) -> Iterator[ast.AST]:
    above: ast.AST | None = node
    while above is not None:
        yield above
        above = tree.parent(above)


def _part(node: ast.AST, below: ast.AST) -> str:
    """Return in which part of a statement with branches a node stands."""
    for name in ("body", "orelse", "handlers", "cases", "finalbody"):
        held = getattr(node, name, ())
        if held is below or (isinstance(held, list) and below in held):
            number = held.index(below) if name in ("handlers", "cases") and isinstance(held, list) else ""
            return f"{name}{number}"
    return ""


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Tell whether nothing behind a body runs once it has run."""
    last = body[-1]
    return isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break) or any(map(_exits, ast.walk(last)))


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _head(loop: _Loop) -> str:
    """Return the first line of a loop."""
    if isinstance(loop, ast.While):
        return f"while {shown(loop.test)}"
    return f"for {shown(loop.target)} in {shown(loop.iter)}"


def _line(node: ast.AST) -> int:
    parts: Iterable[ast.AST] = [node, *ast.walk(node)]
    return next((part.lineno for part in parts if isinstance(part, ast.expr | ast.stmt)), 0)
