"""Run cases of tests/gloo with a double of Transformer Engine that computes in plain torch on the CPU.

python -m tests.lanes.transformer_engine_double SOURCES CASES.json

Our code and Megatron's wrappers really run through it. Every call is bound to the signature in the sources of the wheel
(SOURCES, the folder of its package), so an argument that it does not know, or misses, fails; and what a signature
cannot tell is asserted: shapes of packed sequences, their bounds, dtypes, the scale, the mask.
"""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import math
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SOURCES = Path()
VERSION = "2.17.0"
calls: dict[str, int] = {}  # of every function of the double, by its name


@cache
def signature(name: str) -> inspect.Signature:
    """Return the signature of `Class.method`, or of a function, as the sources have it."""
    owner, _, function = name.rpartition(".")
    found = []
    pytorch = SOURCES / "pytorch"
    files = [file for folder in ("module", "attention") for file in sorted((pytorch / folder).rglob("*.py"))]
    for file in (*files, pytorch / "permutation.py"):
        body = ast.parse(file.read_text("utf-8")).body
        scopes = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        for scope in scopes if owner else [body]:
            found += [node.args for node in scope if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(found) == 1, f"{SOURCES} has {name} {len(found)} times"
    return _signature(found[0])


def _signature(arguments: ast.arguments) -> inspect.Signature:
    def value(node: ast.expr | None) -> Any:
        if node is None:
            return inspect.Parameter.empty
        try:
            return ast.literal_eval(node)
        except ValueError:
            return ast.unparse(node)

    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + arguments.defaults
    kind = inspect.Parameter
    parts = [kind(a.arg, kind.POSITIONAL_OR_KEYWORD, default=value(d)) for a, d in zip(places, defaults, strict=True)]
    parts += [kind(arguments.vararg.arg, kind.VAR_POSITIONAL)] if arguments.vararg else []
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [kind(a.arg, kind.KEYWORD_ONLY, default=value(d)) for a, d in named]
    parts += [kind(arguments.kwarg.arg, kind.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(parts)


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults too; TypeError if the real function would refuse them."""
    calls[name] = calls.get(name, 0) + 1
    found = signature(name).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


def _weight(given: dict[str, Any], *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=given["params_dtype"], device=given["device"]))


_dummy_wgrads: dict[tuple[Any, ...], Tensor] = {}
most = [0]  # bytes of them at once


class Accumulated(torch.autograd.Function):
    """A matrix product whose weight's gradient goes into `main_grad`; autograd gets one that says nothing."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, first: bool | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight, ctx.first, ctx.biased = weight, first, bias is not None
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat = upstream.flatten(0, -2)
        calls["accumulated"] = calls.get("accumulated", 0) + 1
        added = (flat.t() @ inputs.flatten(0, -2)).to(ctx.weight.main_grad.dtype)
        if ctx.first:  # as in the sources: nothing is there yet
            ctx.weight.main_grad.copy_(added)
        else:
            ctx.weight.main_grad.add_(added)
        ctx.weight.grad_added_to_main_grad = True
        key = (*weight.shape, weight.dtype)
        if key not in _dummy_wgrads:
            _dummy_wgrads[key] = torch.full_like(weight, math.nan)
            most[0] = max(most[0], sum(one.nbytes for one in _dummy_wgrads.values()))
        return upstream @ weight, _dummy_wgrads[key].detach(), flat.sum(0) if ctx.biased else None, None


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None, fused: bool, first: bool | None) -> Tensor:
    if fused and torch.is_grad_enabled():
        result: Tensor = Accumulated.apply(inputs, weight, bias, first)
        return result
    return torch.nn.functional.linear(inputs, weight, bias)


def _mark(weight: Tensor, parallel_mode: str | None) -> None:
    """Say how ranks cut a weight, as the sources do: Megatron counts what is not cut once in the gradient's norm."""
    values = {"tensor_model_parallel": True, "partition_dim": int(parallel_mode == "row"), "partition_stride": 1}
    for name, value in values.items():
        setattr(weight, name, value)


class Linear(torch.nn.Module):
    """A matrix product, of which each rank of a group has the rows or the columns of the weight."""

    name = "Linear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.given = bound(f"{self.name}.__init__", self, *args, **kwargs)
        assert not given["fuse_wgrad_accumulation"] and not given["return_bias"]
        self.fuse_wgrad_accumulation = False  # until it is said afterwards
        self.parallel_mode, self.ranks = given["parallel_mode"], given["tp_size"]
        assert self.ranks == 1 or (self.parallel_mode in ("column", "row") and given["tp_group"].size() == self.ranks)
        self.sequence_parallel = given["sequence_parallel"] and self.ranks > 1
        self.use_bias = given["bias"]
        shape = [given["out_features"], given["in_features"]]
        shape[self.parallel_mode == "row"] //= self.ranks
        self.weight = _weight(given, *shape)
        self.bias = _weight(given, shape[0]) if self.use_bias else None
        _mark(self.weight, self.parallel_mode)
        if self.bias is not None and self.parallel_mode == "column":
            _mark(self.bias, None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        given = bound(f"{self.name}.forward", self, *args, **kwargs)
        inputs, cut, group = self.normed(given["inp"]), self.sequence_parallel, self.given["tp_group"]
        column, row = (self.ranks > 1 and self.parallel_mode == mode for mode in ("column", "row"))
        if column:
            inputs = (
                mappings.gather_from_sequence_parallel_region(inputs, group=group)
                if cut
                else mappings.copy_to_tensor_model_parallel_region(inputs, group=group)
            )
        assert inputs.shape[-1] == self.weight.shape[1] and inputs.dtype == self.weight.dtype
        assert not row or self.bias is None, "each rank would add it"
        product = _product(inputs, self.weight, self.bias, self.fuse_wgrad_accumulation, given["is_first_microbatch"])
        if not row:
            return product
        found: Tensor = (
            mappings.reduce_scatter_to_sequence_parallel_region(product, group=group)
            if cut
            else mappings.reduce_from_tensor_model_parallel_region(product, group=group)
        )
        return found

    def normed(self, x: Tensor) -> Tensor:
        return x


class LayerNormLinear(Linear):
    """A norm, and the matrix product behind it. With sequence parallelism each rank norms its part of the tokens."""

    name = "LayerNormLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.given
        assert given["normalization"] == "RMSNorm" and not given["zero_centered_gamma"]
        self.layer_norm_weight = _weight(given, given["in_features"])
        setattr(self.layer_norm_weight, "sequence_parallel", self.sequence_parallel)  # noqa: B010

    def normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.given["eps"])


class GroupedLinear(torch.nn.Module):
    """The matrix products of all experts of a rank, each with the rows of the tokens that were sent to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.given = bound("GroupedLinear.__init__", self, *args, **kwargs)
        assert given["tp_size"] == 1 and not given["bias"] and not given["return_bias"]
        assert not given["fuse_wgrad_accumulation"]
        self.fuse_wgrad_accumulation = False
        self.num_gemms = given["num_gemms"]
        for number in range(self.num_gemms):
            weight = _weight(given, given["out_features"], given["in_features"])
            _mark(weight, given["parallel_mode"])
            self.register_parameter(f"weight{number}", weight)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("GroupedLinear.forward", self, *args, **kwargs)
        x, sizes = given["inp"], list(map(int, given["m_splits"]))
        assert len(sizes) == self.num_gemms and sum(sizes) == len(x) and x.ndim == 2
        found = []
        for number, rows in enumerate(x.split(sizes)):
            weight = getattr(self, f"weight{number}")
            assert rows.shape[1] == weight.shape[1] and rows.dtype == weight.dtype
            found.append(_product(rows, weight, None, self.fuse_wgrad_accumulation, given["is_first_microbatch"]))
        return torch.cat(found)


class RMSNorm(torch.nn.Module):
    """A norm by itself; its arguments are checked by hand, for the class hands on what it does not name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("RMSNorm.__init__", self, *args, **kwargs)
        assert set(given["kwargs"]) <= {"device", "dtype"} and not given["zero_centered_gamma"]
        size, device = given["normalized_shape"] or given["hidden_size"], given["kwargs"].get("device")
        self.eps = given["eps"]
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=given["params_dtype"], device=device))
        if given["sequence_parallel"] is not None:
            setattr(self.weight, "sequence_parallel", given["sequence_parallel"])  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    """Attention over packed sequences, one after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.given = bound("DotProductAttention.__init__", self, *args, **kwargs)
        assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal_bottom_right"
        assert given["window_size"] in (None, (-1, 0)) and given["num_attention_heads"] % given["num_gqa_groups"] == 0
        assert isinstance(given["softmax_scale"], float) and 0 < given["softmax_scale"] <= 1

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given, own = bound("DotProductAttention.forward", self, *args, **kwargs), self.given
        q, k, v = given["query_layer"], given["key_layer"], given["value_layer"]
        assert q.shape[1:] == (own["num_attention_heads"], own["kv_channels"])
        assert k.shape == v.shape and k.shape[1:] == (own["num_gqa_groups"], own["kv_channels"])
        assert q.dtype == k.dtype == v.dtype and given["window_size"] is None and given["attention_mask"] is None
        queries, keys = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        for bounds, longest, rows in ((queries, "max_seqlen_q", q), (keys, "max_seqlen_kv", k)):
            assert bounds.dtype == torch.int32 and bounds.ndim == 1 and bounds[0] == 0 and bounds[-1] == len(rows)
            assert (bounds.diff() >= 0).all() and given[longest] >= int(bounds.diff().max())
        assert len(queries) == len(keys)
        rows, repeat = [], own["num_attention_heads"] // own["num_gqa_groups"]
        for (a, b), (c, d) in zip(_ranges(queries), _ranges(keys), strict=True):
            assert d - c >= b - a, "with the mask at the bottom right, every query must see a key"
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d].repeat_interleave(repeat, 1)) * own["softmax_scale"]
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            chances = scores.masked_fill(~seen, -math.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", chances, v[c:d].repeat_interleave(repeat, 1)))
        return torch.cat(rows).flatten(1)


def _ranges(bounds: Tensor) -> list[tuple[int, int]]:
    values = bounds.tolist()
    return list(zip(values[:-1], values[1:], strict=True))


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Tensor:
    """Rotate [S, 1, N, D] by angles [S, 1, 1, D]."""
    given = bound("apply_rotary_pos_emb", *args, **kwargs)
    x, angles = given["t"], given["freqs"]
    assert given["tensor_format"] == "sbhd" and given["fused"] and not given["interleaved"]
    assert x.ndim == 4 and angles.dtype == torch.float32 and angles.shape == (x.shape[0], 1, 1, x.shape[-1])
    one, two = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-two, one), dim=-1) * angles.sin().to(x.dtype)


def moe_permute_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of every expert, expert by expert, with their probabilities and where they come from."""
    given = bound("moe_permute_with_probs", *args, **kwargs)
    x, probs, chosen = given["inp"], given["probs"], given["routing_map"]
    assert x.shape[:1] == chosen.shape[:1] and probs.shape == chosen.shape
    experts, tokens = chosen.bool().t().nonzero(as_tuple=True)
    assert given["num_out_tokens"] in (-1, len(tokens))
    return x.index_select(0, tokens), probs[tokens, experts], tokens


def moe_unpermute(*args: Any, **kwargs: Any) -> Tensor:
    """Return the sum of what experts made of each token."""
    given = bound("moe_unpermute", *args, **kwargs)
    assert given["merging_probs"] is None and given["map_type"] == "mask" and given["probs"] is None
    made: Tensor = given["inp"]
    return made.new_zeros(given["restore_shape"]).index_add(0, given["row_id_map"], made)


def moe_sort_chunks_by_index(*args: Any, **kwargs: Any) -> Tensor:
    """Return the chunks in another order."""
    given = bound("moe_sort_chunks_by_index", *args, **kwargs)
    return _sorted(given["inp"], given)


def moe_sort_chunks_by_index_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the chunks in another order, and their probabilities."""
    given = bound("moe_sort_chunks_by_index_with_probs", *args, **kwargs)
    return _sorted(given["inp"], given), _sorted(given["probs"], given)


def _sorted(x: Tensor, given: dict[str, Any]) -> Tensor:
    chunks = x.split(given["split_sizes"].tolist())
    return torch.cat([chunks[number] for number in given["sorted_index"].tolist()])


class Unused:
    """A class that Megatron needs to be imported, and of which a model in 32 bits makes no object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the double has nothing of this kind")


class FP8GlobalStateManager:
    """The state of FP8, which is off."""

    is_fp8_enabled = is_fp8_calibration = staticmethod(lambda: False)


def install(sources: Path) -> None:
    """Put the double in the place of Transformer Engine, before Megatron is imported."""
    global SOURCES
    SOURCES = sources
    parts: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {},
        ".common.recipe": {"DelayedScaling": Unused},
        ".pytorch": {
            **{one.__name__: one for one in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)},
            "LayerNorm": type("LayerNorm", (Unused, torch.nn.Module), {}),
        },
        ".pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": Unused},
        ".pytorch.distributed": {"CudaRNGStatesTracker": Unused, "activation_recompute_forward": Unused},
        ".pytorch.ops": {"Sequential": Unused, "FusibleOperation": Unused},
        ".pytorch.attention": {},
        ".pytorch.tensor": {"QuantizedTensor": Unused},  # what Megatron asks weights whether they are
        ".pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": Unused},
        ".pytorch.tensor.utils": {"replace_raw_data": Unused, "cast_master_weights_to_fp8": Unused},
        ".pytorch.float8_tensor": {"Float8Tensor": Unused},
        ".pytorch.module": {},
        ".pytorch.module.base": {"_dummy_wgrads": _dummy_wgrads},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        ".pytorch.permutation": {
            "moe_permute": Unused,
            **{
                one.__name__: one
                for one in (
                    moe_permute_with_probs,
                    moe_unpermute,
                    moe_sort_chunks_by_index,
                    moe_sort_chunks_by_index_with_probs,
                )
            },
        },
        ".pytorch.router": {
            name: Unused
            for name in (
                "fused_compute_score_for_moe_aux_loss",
                "fused_moe_aux_loss",
                "fused_topk_with_score_function",
            )
        },
    }
    for name, members in parts.items():
        path = f"transformer_engine{name}"
        module = ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
        module.__path__ = []  # what is not here cannot be imported
        vars(module).update(members)
        sys.modules[path] = module
        parent, _, last = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def main() -> None:
    """Run the cases."""
    install(Path(sys.argv.pop(1)))
    from gspo_hpc.policy import layers, model
    from tests.gloo import cases

    def fused(config: Any) -> bool:
        return True

    layers.uses_transformer_engine = model.uses_transformer_engine = fused  # else they are for GPUs only
    cases.main()
    assert not _dummy_wgrads, "tensors without a meaning outlive the pass"
    print(f"unused gradients: {most[0]}")
    print("calls:", *(f"{name}={count}" for name, count in sorted(calls.items())))


if __name__ == "__main__":
    main()
