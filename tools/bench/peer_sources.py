"""Functions, classes and statements of the peers, taken from the files of their installed packages as they stand there.

The packages of TRL, ms-swift and OpenRLHF cannot be imported without what they train with (DeepSpeed, modelscope), and
many of their formulas are statements of a long method.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
from pathlib import Path
from typing import Any, Optional, Union

import numpy.typing as npt
import torch
from torch import Tensor, nn

Arrays = dict[str, npt.NDArray[Any]]
Names = dict[str, Any]
TYPES: Names = {"torch": torch, "nn": nn, "Tensor": Tensor, "Optional": Optional, "Union": Union}
TYPES |= {"List": list, "Tuple": tuple, "Dict": dict, "itertools": itertools}


def tree(package: str, file: str) -> ast.Module:
    """Return the syntax tree of a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: setup_peers.sh"
    return ast.parse((Path(next(iter(spec.submodule_search_locations))) / file).read_text())


def defined(package: str, file: str, *names: str, given: Names | None = None) -> Any:
    """Return the last of the functions, classes and constants of these names in a file, run with what is given."""
    space = TYPES | (given or {})
    for node in ast.walk(tree(package, file)):
        assigned = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id
        if assigned in names or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
            code = "from __future__ import annotations\n" + ast.unparse(node)
            exec(compile(code, file, "exec"), space)
    return space[names[-1]]


def statements(package: str, file: str, first: str, last: str) -> Any:
    """Return the statements of a block from that which begins with `first` to that which begins with `last`."""
    for node in ast.walk(tree(package, file)):
        body = getattr(node, "body", None)
        texts = [ast.unparse(one) for one in body] if isinstance(body, list) else []
        begins = [place for place, text in enumerate(texts) if text.startswith(first)]
        ends = [place for place, text in enumerate(texts) if text.startswith(last)]
        if begins and ends:
            return compile("\n".join(texts[begins[0] : ends[-1] + 1]), file, "exec")
    raise LookupError(f"{package}/{file} has no block from {first!r} to {last!r}: another version?")
