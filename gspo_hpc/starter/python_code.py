"""Read the Python file of a TRL run for what a project takes over: its dataset, its reward functions, its rows.

The file is parsed, never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gspo_hpc.models import hub_cache

# What only a training script needs: a function that uses one of them is not copied, for it would start the script.
_TRAINING = frozenset(
    {"trl", "transformers", "datasets", "torch", "accelerate", "peft", "vllm", "wandb", "swift", "verl"}
)


@dataclass(frozen=True)
class Dataset:
    """A dataset on the hub that a file names in so many words."""

    repo: str
    subset: str  # empty for the only one
    split: str


class Code:
    """The top level of a Python file, by name."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            self._tree = ast.Module([], [])
        self._places: dict[str, ast.stmt] = {}
        for node in self._tree.body:
            self._places |= dict.fromkeys(_bound(node), node)

    def dataset(self) -> Dataset | None:
        """Return the dataset on the hub that is trained on, if the file names one and no other."""
        found = {one for node in ast.walk(self._tree) if isinstance(node, ast.Call) and (one := _loaded(node))}
        trained = {one for one in found if one.split == "train"} or found
        return trained.pop() if len(trained) == 1 else None

    def rows(self) -> ast.expr | None:
        """Return the function that the dataset is mapped with, if the file has one and no other."""
        found = [
            node.args[0]
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "map"
            and node.args
        ]
        functions = [one for one in found if isinstance(one, ast.Lambda) or _named(one, self._places)]
        return functions[0] if len(functions) == 1 else None

    def prompt_key(self) -> str | None:
        """Return the field of the dataset's rows that becomes the prompt in :meth:`rows`, if it is one."""
        rows = self.rows()
        whole: ast.AST | None = self._places[rows.id] if isinstance(rows, ast.Name) else rows
        for node in ast.walk(whole) if whole is not None else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "prompt":
                        names = {one.slice.value for one in ast.walk(value) if _is_field(one)}  # type: ignore[attr-defined]
                        return names.pop() if len(names) == 1 else None
        return None

    def segment(self, node: ast.AST) -> str:
        """Return the text of an expression."""
        return ast.get_source_segment("\n".join(self._lines), node) or ""

    def needed(self, *roots: ast.AST | str) -> str | None:
        """Return the text of these functions with all of the top level that they use, in its order.

        None if one is not there, or uses what only the training script needs.
        """
        nodes: dict[int, ast.stmt] = {}
        waiting: list[str] = []
        for root in roots:
            waiting += [root] if isinstance(root, str) else [name for name in _used(root) if name in self._places]
        while waiting:
            name = waiting.pop()
            if (node := self._places.get(name)) is None:
                return None
            if node.lineno in nodes:
                continue
            nodes[node.lineno] = node
            if _TRAINING & set(_imports(node)):
                return None
            waiting += [used for used in _used(node) if used in self._places]
        return "\n\n".join(self._text(node) for _, node in sorted(nodes.items()))

    def _text(self, node: ast.stmt) -> str:
        decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
        return "\n".join(self._lines[min([node.lineno, *decorators]) - 1 : node.end_lineno])


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of the top level gives a meaning to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((one.asname or one.name).partition(".")[0] for one in node.names)
    else:
        yield from (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def _used(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]


def _imports(node: ast.stmt) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            yield (one.module or "").partition(".")[0]


def _named(node: ast.expr, places: dict[str, ast.stmt]) -> bool:
    return isinstance(node, ast.Name) and isinstance(places.get(node.id), ast.FunctionDef)


def _is_field(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    )


def _loaded(node: ast.Call) -> Dataset | None:
    """Return the dataset of a call of load_dataset whose arguments are written out."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name != "load_dataset":
        return None
    given = {word.arg: word.value for word in node.keywords if word.arg}
    given |= dict(zip(("path", "name"), node.args, strict=False))
    texts = {
        key: one.value for key, one in given.items() if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    if not re.fullmatch(hub_cache.REPO, texts.get("path", "")) or "data_files" in given or "revision" in given:
        return None
    if any(key in given and key not in texts for key in ("name", "split")):
        return None  # known only when the file runs
    return Dataset(texts["path"], texts.get("name", ""), texts.get("split", "train").partition("[")[0])
