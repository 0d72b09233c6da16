"""Put the classes of arguments that a Python file imports from files beside it into its syntax tree.

They are then read as if the file defined them. Each stands where it is imported, with that line. A class is left where
it is if a name that it uses means something else in the file.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gspo_hpc.importers.scripts.places import around
from gspo_hpc.importers.texts.syntax import LIBRARIES, base_name, called

_CONFIG = "GRPOConfig"
_ENDS = ("Config", "Arguments", "Args")  # of names of classes of arguments
_DEEPEST = 4  # files that import from each other
_LARGEST = 1 << 20  # bytes
Statement = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.ClassDef


class Merged(NamedTuple):
    """A module with what it imports, and where that is from."""

    module: ast.Module
    read: dict[str, list[str]]  # path -> classes that are read there
    absent: dict[str, str]  # name of what may be a class of arguments -> its module, which is not at hand


def merged(module: ast.Module, place: Path | None) -> Merged:
    """Return a module with the classes of arguments that it imports. `place`: its own file."""
    return _merged(module, place, 0, None, {})


def _merged(
    module: ast.Module, place: Path | None, depth: int, wanted: set[str] | None, parsed: dict[Path, ast.Module | None]
) -> Merged:
    """Return a module with what it imports. `wanted`: names whose imports are followed, None for all of them."""
    found = Merged(module, {}, {})
    own = {} if wanted is None else statements(module)
    if wanted is not None and not any(isinstance(own.get(name), ast.ClassDef | ast.ImportFrom) for name in wanted):
        return found
    body: list[ast.stmt] = []
    bound = _bound(module)
    needed = None if wanted is None else _needed(own, wanted)
    for node in module.body:
        if not isinstance(node, ast.ImportFrom) or place is None or depth > _DEEPEST or is_known(node):
            body.append(node)
            continue
        if needed is not None and not needed & {item.asname or item.name for item in node.names}:
            body.append(node)
            continue
        path = path_of(node, place)
        if path is not None and path not in parsed:
            parsed[path] = parse(path)
        other = None if path is None else parsed[path]
        if path is None or other is None:
            name = "." * node.level + (node.module or "")
            found.absent.update({item.asname or item.name: name for item in node.names})
            body.append(node)
            continue
        inner = _merged(other, path, depth + 1, {item.name for item in node.names}, parsed)
        names: list[ast.alias] = []
        for item in node.names:
            given = _class_of(inner.module, item, bound)
            if not given:
                names.append(item)
                continue
            found.read.setdefault(path.name, []).append(item.name)
            for statement in given:
                body.append(_moved(copy.deepcopy(statement), node, len(body)))
                bound |= _bound(ast.Module([statement], []))
        found.absent.update({name: of for name, of in inner.absent.items() if name in {item.name for item in names}})
        if names:
            body.append(ast.copy_location(ast.ImportFrom(node.module, names, node.level), node))
    return found._replace(module=ast.Module(body, module.type_ignores))


def _needed(own: Mapping[str, Statement], wanted: set[str]) -> set[str]:
    """Return the names of a module that what is wanted of it is made of: bases and fields, without methods."""
    found, left = set[str](), [*wanted]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        match own.get(name):
            case ast.ClassDef(bases=bases, decorator_list=made, body=body):
                parts = [item for item in body if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
                left += [used for part in (*bases, *made, *parts) for used in _used(part)]
            case ast.Assign() | ast.AnnAssign() as statement:
                left += _used(statement)
    return found


def hands_on(text: str) -> bool:
    """Tell whether a Python file imports modules that are neither Python's own nor of a package that is known.

    It may hand the rest to one of them. A text that Python cannot parse does not.
    """
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    roots = {item.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for item in node.names}
    known = LIBRARIES | sys.stdlib_module_names
    return not roots <= known or any(isinstance(node, ast.ImportFrom) and not is_known(node) for node in nodes)


def is_known(node: ast.ImportFrom) -> bool:
    """Tell whether a module is one of Python's own or of a package that is known."""
    root = (node.module or "").partition(".")[0]
    return not node.level and (root in LIBRARIES or root in sys.stdlib_module_names)


def path_of(node: ast.ImportFrom, place: Path) -> Path | None:
    """Return the file of a module that a file imports from, None if it is not at hand."""
    parts = (node.module or "").split(".") if node.module else []
    folders = [place.parent, *place.parent.parents][node.level - 1 : node.level] if node.level else around(place.parent)
    for folder in folders:
        for path in ((folder.joinpath(*parts).with_suffix(".py")) if parts else folder / "__init__.py",
                     folder.joinpath(*parts, "__init__.py")):  # fmt: skip
            try:
                if path.is_file() and path.stat().st_size <= _LARGEST and path != place:
                    return path
            except OSError:
                continue
    return None


def parse(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file, None if it cannot be read or parsed."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _bound(module: ast.Module) -> dict[str, str]:
    """Return the names that a module binds in any scope of its own, each with the code that does."""
    found: dict[str, str] = {}
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = f"{name} in line {node.lineno}"
            case ast.ClassDef(name=name):
                found[name] = ast.dump(node)
            case ast.ImportFrom() | ast.Import():
                found |= {item.asname or item.name.partition(".")[0]: _shown(node, item) for item in node.names}
    return found


def _shown(node: ast.Import | ast.ImportFrom, item: ast.alias) -> str:
    module = f"{'.' * node.level}{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return f"import {module}{item.name}"


def _class_of(module: ast.Module, item: ast.alias, bound: dict[str, str]) -> list[Statement]:
    """Return the class of arguments that is imported by a name, after what it uses; nothing for anything else.

    `bound`: what the names of the importing file are.
    """
    own = statements(module)
    node = own.get(item.name)
    if item.asname not in (None, item.name) or not isinstance(node, ast.ClassDef) or not _is_config(node, own):
        return []
    theirs = _bound(module)
    found: list[Statement] = []
    left, seen = [item.name], set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        held = bound.get(name) if name != item.name else None
        if held is not None and held != theirs.get(name):
            return []  # it means something else there
        if (statement := own.get(name)) is not None and held is None:
            if statement not in found:
                found.insert(0, statement)
            left += _used(statement)
    return sorted(found, key=lambda statement: statement.lineno)


def statements(module: ast.Module) -> dict[str, Statement]:
    """Return the statements of a module that bind a name, where there is one alone."""
    found: dict[str, list[Statement]] = {}
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                found.setdefault(name, []).append(node)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.setdefault(name, []).append(node)
            case ast.Import() | ast.ImportFrom():
                for item in node.names:
                    part = ast.Import([item])
                    alone = (
                        ast.ImportFrom(node.module, [item], node.level) if isinstance(node, ast.ImportFrom) else part
                    )
                    name = item.asname or item.name.partition(".")[0]
                    found.setdefault(name, []).append(ast.copy_location(alone, node))
    return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}


def _is_config(node: ast.ClassDef, own: dict[str, Statement], depth: int = 0) -> bool:
    """Tell whether a class is a dataclass, or is derived from one or from TRL's config."""
    made = [base_name(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list]
    if "dataclass" in made:
        return True
    if any(base_name(base) == _CONFIG for base in node.bases):
        return True
    above = [base for base in map(own.get, map(base_name, node.bases)) if isinstance(base, ast.ClassDef)]
    return depth < len(own) and any(_is_config(base, own, depth + 1) for base in above)


def _used(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads."""
    yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))


def _moved(node: Statement, to: ast.ImportFrom, number: int) -> Statement:
    """Return a statement as one that stands in the line of an import, behind those that stand there already."""
    for part in ast.walk(node):
        if hasattr(part, "lineno"):
            part.lineno = part.end_lineno = to.lineno  # type: ignore[attr-defined]
            part.col_offset = part.end_col_offset = number  # type: ignore[attr-defined]
    return node


def not_at_hand(module: ast.Module, absent: dict[str, str]) -> str:
    """Return which class of a module that is not at hand a file makes or parses, as a clause; "" if none."""
    names = dict[str, None]()
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        given = [part.id for item in (*call.args, *(word.value for word in call.keywords)) for part in ast.walk(item)
                 if isinstance(part, ast.Name)] if "arser" in called(call) else []  # fmt: skip
        made = [called(call)] if called(call).endswith(_ENDS) else []
        names |= dict.fromkeys(name for name in (*made, *given) if name in absent)
    for name in sorted(names, key=lambda name: ("GRPO" not in name, not name.endswith("Config"))):
        file = absent[name].lstrip(".").replace(".", "/")
        return f"{name} is a class of {absent[name]}, which is not at hand: put {file}.py beside the file"
    return ""
