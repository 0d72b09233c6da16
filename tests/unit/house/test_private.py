"""Private interfaces of outside libraries are used in ``compat`` modules only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
