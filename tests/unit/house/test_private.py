"""Private interfaces of outside libraries are used in ``compat`` modules only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Of the standard library: argparse, os, named tuples, multiprocessing.
STANDARD = {"_actions", "_exit", "_replace", "_asdict", "_config", "_SHM_NAME_PREFIX"}
REPLACED = ("megatron", "vllm", "submitit")  # libraries none of whose functions is replaced elsewhere


def private(source: str) -> Iterator[str]:
    """Yield where a module reaches an outside library's name with a leading underscore, or replaces its functions.

    Seen is what begins with an imported name, or with a variable that is such a name or an attribute of it.
    """
    nodes = list(ast.walk(ast.parse(source)))
    outside: dict[str, str] = {}  # name here -> where it comes from
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for one in node.names:
                path = f"{module}.{one.name}".lstrip(".")
                if path.split(".")[0] in sys.stdlib_module_names or path.startswith(("gspo_hpc", "__future__")):
                    continue
                outside[one.asname or (one.name if module else one.name.split(".")[0])] = path
                if any(part.startswith("_") for part in path.split(".")):
                    yield f"line {node.lineno}: import of {path}"
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute | ast.Name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and (origin := outside.get(_root(node.value))):
                    outside[target.id] = origin
    for node in nodes:
        if isinstance(node, ast.Attribute) and (origin := outside.get(_root(node))):
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            elif isinstance(node.ctx, ast.Store) and origin.split(".")[0] in REPLACED:
                yield f"line {node.lineno}: {ast.unparse(node)} is replaced"


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def reached(source: str) -> Iterator[str]:
    """Yield where a module reaches a name with a leading underscore of an object that is not its own.

    Its own are `self`, `cls` and whatever has a name that the module itself defines or sets on them.
    """
    nodes = list(ast.walk(ast.parse(source)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    mine = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    mine |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in attributes:
        name = node.attr
        if name.startswith("_") and not name.startswith("__") and name not in mine | STANDARD:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_objects_of_libraries_are_not_reached_into(project: Path) -> None:
    files = [file for file in sorted((project / "gspo_hpc").rglob("*.py")) if file.name != "compat.py"]
    assert len(files) > 200
    found = {str(file): lines for file in files if (lines := list(reached(file.read_text("utf-8"))))}
    assert found == {}


def test_a_planted_reach_is_seen() -> None:
    code = "def f(llm):\n    return llm.engine._core.step()\nclass A:\n    def g(self, other):\n        return "
    assert list(reached(code + "self._x")) == ["line 2: llm.engine._core"]
    assert list(reached(code + "self._x + other._x + other._y")) == ["line 2: llm.engine._core", "line 5: other._y"]


def test_private_interfaces_are_in_compat_modules_only(project: Path) -> None:
    files = sorted((project / "gspo_hpc").rglob("*.py"))
    found = {file: list(private(file.read_text("utf-8"))) for file in files}
    named = {file: lines for file, lines in found.items() if lines}
    homes = [file for file in named if file.name == "compat.py"]
    assert {file.parent.name for file in homes} >= {"policy", "checkpoint", "engine", "training"}  # what it does see
    assert {str(file): lines for file, lines in named.items() if file not in homes} == {}


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ("import torch\ntorch._C._f()", ["line 2: torch._C._f", "line 2: torch._C"]),
        ("from vllm.engine import _registry", ["line 1: import of vllm.engine._registry"]),
        ("import torch._dynamo", ["line 1: import of torch._dynamo"]),
        ("from megatron.core import mappings as m\nm.gather = f", ["line 2: m.gather is replaced"]),
        ("import torch\nstore: Any = torch.distributed\nstore._world", ["line 3: store._world"]),
        ("import os\nos._exit(0)\nclass A:\n    def f(self):\n        self._x = torch.cuda.f()", []),
    ],
)
def test_a_planted_use_is_seen(planted: str, seen: list[str]) -> None:
    assert list(private(planted)) == seen


# Collectives of torch that pickle what they send, and run what a pickle says where it arrives.
PICKLING = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def test_ranks_send_each_other_no_pickles(project: Path) -> None:
    for file in sorted((project / "gspo_hpc").rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text("utf-8")))
        assert not PICKLING & {node.attr for node in nodes if isinstance(node, ast.Attribute)}, file
