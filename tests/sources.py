"""Names in the sources of an installed package, found without importing it.

The ``compat`` modules use names that their libraries do not promise to keep. A test per module lists these names, with
the parameters that are relied on, and the versions for which somebody has read them.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# By "file: Class.name": the leading parameters of a function; () where only the name counts, as of an attribute.
Names = Mapping[str, tuple[str, ...]]


def require_checked(distributions: Sequence[str], versions: Sequence[str], compat: str, names: Names) -> Path:
    """Return the folder of the installed distribution; fail if nobody has checked `names` against its version."""
    found = next(found for name in distributions for found in importlib.metadata.distributions(name=name))
    version = found.version.partition("+")[0]
    listed = "\n  ".join(names)
    assert version in versions, (
        f"{found.name} {version} is none of the versions that {compat} was checked against ({', '.join(versions)}). "
        f"Read what that module says of each name, compare with the new sources, then add the version here:\n  {listed}"
    )
    return Path(str(found.locate_file("")))


def missing(root: Path, names: Names) -> list[str]:
    """Return what is wrong with `names` in the sources below `root`; an empty list if they are all as listed."""
    problems = []
    for place, wanted in names.items():
        file, _, name = place.partition(": ")
        path = root / file
        nodes = list(_find(ast.parse(path.read_text("utf-8")), name.split("."))) if path.is_file() else []
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        if not nodes or (wanted and not functions):
            problems.append(f"{place} is not there")
        for node in functions if wanted else ():
            given = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
            if given[: len(wanted)] != wanted:
                problems.append(f"{place} takes {given}, and {wanted} is relied on")
    return problems


def _find(node: ast.AST, path: Sequence[str]) -> Iterator[ast.AST]:
    """Yield all definitions of the dotted name `path` below `node`: classes, functions, variables, self.attributes."""
    for child in ast.walk(node):
        if child is node or _name(child) != path[0]:
            continue
        if len(path) == 1:
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from _find(child, path[1:])


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.name.rpartition(".")[2] if isinstance(node, ast.alias) and node.asname is None else None
