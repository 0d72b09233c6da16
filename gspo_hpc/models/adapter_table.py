"""The linear layers that adapters can be on: their names here and at Hugging Face, and the sizes of their matrices.

No torch, so that a plan can count what is trained; :mod:`gspo_hpc.policy.adapters.lora` computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_hpc.models.architecture import Architecture

ALL = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterPart:
    """A linear layer of Hugging Face's model with an adapter: A [rank, inputs], B [outputs, rank]."""

    target: str
    module: str  # its name in Hugging Face's model
    inputs: int
    outputs: int


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of Megatron's that holds one or several of Hugging Face's, some of which have adapters."""

    path: str  # in its layer
    parts: tuple[AdapterPart, ...]  # in the order of their rows
    cut: str  # of its weight, as in WeightMapping: "qkv" and "gate_up" are cut by rows, "columns" by columns


def chosen(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets that a config names, in the order of TARGETS."""
    return tuple(name for name in TARGETS if name in targets or ALL in targets)


def shapes(arch: Architecture, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the shapes of all matrices of a model without experts, by their layer's name with lora_A or lora_B."""
    found: dict[str, tuple[int, int]] = {}
    for layer in range(arch.num_layers):
        for part in (part for linear in adapted_linears(arch, targets, layer) for part in linear.parts):
            found[f"{part.module}.lora_A"] = (rank, part.inputs)
            found[f"{part.module}.lora_B"] = (part.outputs, rank)
    return found


def adapted_linears(arch: Architecture, targets: Sequence[str], layer: int) -> list[AdaptedLinear]:
    """Return the linear layers with adapters of a layer without experts, which is counted from 0 over all stages."""
    hidden, ffn, size = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * size, arch.num_key_value_heads * size
    places = {
        "q_proj": ("self_attention.linear_qkv", "qkv", "self_attn", hidden, queries),
        "k_proj": ("self_attention.linear_qkv", "qkv", "self_attn", hidden, keys),
        "v_proj": ("self_attention.linear_qkv", "qkv", "self_attn", hidden, keys),
        "o_proj": ("self_attention.linear_proj", "columns", "self_attn", queries, hidden),
        "gate_proj": ("mlp.linear_fc1", "gate_up", "mlp", hidden, ffn),
        "up_proj": ("mlp.linear_fc1", "gate_up", "mlp", hidden, ffn),
        "down_proj": ("mlp.linear_fc2", "columns", "mlp", ffn, hidden),
    }
    found: dict[tuple[str, str], list[AdapterPart]] = {}
    for target in chosen(targets):
        path, cut, block, inputs, outputs = places[target]
        part = AdapterPart(target, f"model.layers.{layer}.{block}.{target}", inputs, outputs)
        found.setdefault((path, cut), []).append(part)
    return [AdaptedLinear(path, tuple(parts), cut) for (path, cut), parts in found.items()]
