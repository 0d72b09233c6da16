"""Our calls of Transformer Engine, and Megatron's, against the signatures in its sources.

It cannot be imported without CUDA, so sources are read, of the versions that `bash tools/lanes.sh transformer-engine`
has fetched: Transformer Engine's, and Megatron's beside the installed one.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(os.environ.get("GSPO_HPC_LANE_TE", ""))  # the folder of its package
EXTENSION = "core/extensions/transformer_engine.py"
pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_TE" not in os.environ, reason="bash tools/lanes.sh transformer-engine")
NEEDED = {"Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention", "RMSNorm"}  # of a layer


@dataclass(frozen=True)
class Call:
    """A call of a class, or of a method of it."""

    target: str
    method: str
    positional: int
    names: frozenset[str]
    complete: bool  # nothing but what is written there is passed

    def problem(self, signature: ast.arguments) -> str | None:
        """Return why a function with this signature refuses the call."""
        places = [a.arg for a in (*signature.posonlyargs, *signature.args)][1:]
        known = {*places, *(a.arg for a in signature.kwonlyargs)}
        needed = set(places[: len(places) - len(signature.defaults)])
        needed |= {a.arg for a, d in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if d is None}
        if self.positional > len(places) and signature.vararg is None:
            return f"{self.target}.{self.method} takes {len(places)} arguments, {self.positional} are given"
        if (unknown := self.names - known) and signature.kwarg is None:
            return f"{self.target}.{self.method} does not take {sorted(unknown)}"
        given = self.names | set(places[: self.positional])
        if self.complete and (missing := needed - given):
            return f"{self.target}.{self.method} needs {sorted(missing)}"
        return None


@cache
def classes(root: Path) -> dict[str, ast.ClassDef]:
    """Return Transformer Engine's modules for torch, by name."""
    files = [file for folder in ("module", "attention") for file in sorted((root / "pytorch" / folder).rglob("*.py"))]
    assert files, f"{root} has no sources"
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def method(name: str, of: str) -> ast.arguments:
    found = [n for n in classes(ENGINE)[of].body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert found, f"{of} has no {name}"
    return found[0].args


def ours() -> Iterator[Call]:
    """Yield the calls of this package."""
    for node in ast.walk(ast.parse((ROOT / "gspo_hpc/policy/layers.py").read_text())):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if text == "DotProductAttention":
                yield call(node, "DotProductAttention", "__init__")
            if text == "self.fused":
                yield call(node, "DotProductAttention", "forward")


def megatrons(source: Path) -> Iterator[Call]:
    """Yield the calls of Megatron's modules to the classes that they derive from, or wrap."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef):
            bases = [text for base in node.bases if (text := ast.unparse(base)).startswith("te.pytorch.")]
            for base in bases:
                yield from upwards(node, base.rpartition(".")[2])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("te.pytorch.RMSNorm", "te.pytorch.LayerNorm"):
            yield call(node, ast.unparse(node.func).rpartition(".")[2], "__init__")


def upwards(derived: ast.ClassDef, base: str) -> Iterator[Call]:
    """Yield what a class calls of `base` by super()."""
    if "." in base or base not in classes(ENGINE):
        return
    for node in ast.walk(derived):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("super().__init__", "super().forward"):
            name = ast.unparse(node.func).rpartition(".")[2]
            yield call(node, base, name, extras(derived) if name == "__init__" else frozenset())


def extras(node: ast.AST) -> frozenset[str]:
    """Return the names that are put into the dictionary `extra_kwargs`, which is passed on."""
    texts = [
        target.slice.value
        for part in newest(node)
        if isinstance(part, ast.Assign)
        for target in part.targets
        if isinstance(target, ast.Subscript)
        and ast.unparse(target.value) == "extra_kwargs"
        and isinstance(target.slice, ast.Constant)
    ]
    return frozenset(map(str, texts))


def newest(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one but those for versions before the ones that Megatron asks for."""
    yield node
    older = node.orelse if isinstance(node, ast.If) and "is_te_min_version" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        if child not in older:
            yield from newest(child)


def call(node: ast.Call, target: str, name: str, more: frozenset[str] = frozenset()) -> Call:
    names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    stars = any(isinstance(argument, ast.Starred) for argument in node.args)
    complete = not stars and all(keyword.arg is not None for keyword in node.keywords)
    return Call(target, name, len(node.args), frozenset(names) | (more if not complete else frozenset()), complete)


def installed_megatron() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def problems(calls: list[Call]) -> list[str]:
    return [text for one in calls if (text := one.problem(method(one.method, one.target))) is not None]


def test_our_calls_are_taken() -> None:
    calls = list(ours())
    assert sorted(one.method for one in calls) == ["__init__", "forward"]
    assert problems(calls) == []


@pytest.mark.parametrize("root", [None, os.environ.get("GSPO_HPC_LANE_MEGATRON")], ids=["installed", "newest"])
def test_megatrons_calls_are_taken(root: str | None) -> None:
    calls = list(megatrons((Path(root) if root else installed_megatron()) / EXTENSION))
    assert {one.target for one in calls} >= NEEDED
    assert problems(calls) == []


def test_the_mask_and_the_layout_that_we_ask_for_are_known() -> None:
    """They are texts, which no signature checks."""
    sources = "".join(file.read_text("utf-8") for file in (ENGINE / "pytorch" / "attention").rglob("*.py"))
    for word in ("padding_causal_bottom_right", "thd"):
        assert f'"{word}"' in sources
        assert f'"{word}"' in (ROOT / "gspo_hpc/policy/layers.py").read_text()


def test_weights_in_8_bits_are_kept_where_we_drop_them() -> None:
    """In a dictionary that every layer has from its beginning, and from which each takes what it has, or makes anew."""
    kept = "self._fp8_workspaces"
    made = [ast.unparse(node) for node in ast.walk(classes(ENGINE)["TransformerEngineBaseModule"])]
    assert any(text.startswith(kept) and text.endswith("= {}") for text in made)
    for name in sorted(NEEDED & {"Linear", "LayerNormLinear", "GroupedLinear"}):
        texts = [ast.unparse(node) for node in ast.walk(classes(ENGINE)[name]) if isinstance(node, ast.expr)]
        uses = {text for text in texts if text.startswith(f"{kept}.") or text.startswith(f"{kept}[")}
        assert uses and all(text.startswith((f"{kept}.get", f"{kept}[")) for text in uses), (name, uses)
    assert "_fp8_workspaces" in (ROOT / "gspo_hpc/policy/compat.py").read_text()


def test_gradients_go_into_the_buffers_where_a_layer_is_told_so() -> None:
    """Each layer reads the attribute when it computes, and takes what autograd gets from the dictionary we clear."""
    ours = (ROOT / "gspo_hpc/policy/compat.py").read_text()
    assert '"fuse_wgrad_accumulation", True' in ours and '"_dummy_wgrads"' in ours
    for name in sorted(NEEDED & {"Linear", "LayerNormLinear", "GroupedLinear"}):
        (forward,) = (n for n in classes(ENGINE)[name].body if isinstance(n, ast.FunctionDef) and n.name == "forward")
        assert "self.fuse_wgrad_accumulation" in ast.unparse(forward), name
        assert not any("fuse_wgrad_accumulation" in ast.unparse(n) for n in sets_of(name)), f"{name} keeps a copy of it"
    for file in ("linear", "layernorm_linear", "grouped_linear"):
        text = (ENGINE / "pytorch" / "module" / f"{file}.py").read_text("utf-8")
        assert "grad_added_to_main_grad = True" in text and "get_dummy_wgrad(" in text
    base = (ENGINE / "pytorch" / "module" / "base.py").read_text("utf-8")
    assert "\n_dummy_wgrads = {}\n" in base and "if key not in _dummy_wgrads:" in base


def sets_of(name: str) -> Iterator[ast.Assign]:
    """Yield what a layer's __init__ sets from the attribute, beside the attribute itself."""
    (made,) = (n for n in classes(ENGINE)[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    for node in ast.walk(made):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "self.fuse_wgrad_accumulation":
            yield node


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Call("DotProductAttention", "__init__", 2, frozenset({"num_groups"}), True), "does not take"),
        (Call("DotProductAttention", "__init__", 1, frozenset(), True), "needs"),
        (Call("GroupedLinear", "forward", 9, frozenset(), True), "arguments"),
    ],
)
def test_a_wrong_call_is_told(bad: Call, why: str) -> None:
    (found,) = problems([bad]) or ["nothing"]
    assert why in found
