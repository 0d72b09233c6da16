"""The layers that adapters can be on: their names here and at Hugging Face, and the sizes of their matrices.

No torch, so that a plan can count what is trained; :mod:`gspo_hpc.policy.adapters.lora` computes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gspo_hpc.models.architecture import Architecture

ALL = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING = "embed_tokens"  # only where it is named: all-linear leaves it out, as peft does
CHOICES = (ALL, *TARGETS, EMBEDDING)

_MIXTRAL_FAMILY = "MixtralForCausalLM"  # whose layers have experts, all of them, with names of their own
TO_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OF_MIXTRAL = {theirs: target for target, theirs in TO_MIXTRAL.items()}


@dataclass(frozen=True)
class AdapterPart:
    """A layer of Hugging Face's model with an adapter: A [rank, inputs], B [outputs, rank].

    The inputs of an embedding are the tokens of the vocabulary.
    """

    target: str
    module: str  # its name in Hugging Face's model
    inputs: int
    outputs: int


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of Megatron's that holds one or several of Hugging Face's, some of which have adapters.

    The embedding counts as one.
    """

    path: str  # in its layer, or of an expert: in that; the embedding's in the model
    parts: tuple[AdapterPart, ...]  # in the order of their rows
    # Of its weight, as in WeightMapping: "qkv" and "gate_up" are cut by rows of W, "columns" by columns, and
    # "vocab" by tokens, which are the inputs of an embedding and the rows of its weight.
    cut: str
    expert: int | None = (
        None  # its expert's number in the layer, if it has one: then only some ranks of a stage hold it
    )


def chosen(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets that a config names, in the order of TARGETS, and the embedding behind them."""
    every = ALL in targets
    return tuple(name for name in (*TARGETS, EMBEDDING) if name in targets or (every and name != EMBEDDING))


def targets_of(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the targets to which layers belong that have these names at Hugging Face, in the order of TARGETS."""
    last = {module.rpartition(".")[2] for module in modules}
    return chosen([_OF_MIXTRAL.get(name, name) for name in last])


def module_names(arch: Architecture, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the names by which `peft` finds the layers of these targets."""
    return tuple(_last(arch, target) for target in chosen(targets))


def shapes(arch: Architecture, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the shapes of all matrices of a model, by their layer's name with lora_A or lora_B."""
    found: dict[str, tuple[int, int]] = {}
    linears = list(embedding(arch, targets))
    for layer in range(arch.num_layers):
        linears += every_linear(arch, targets, layer)
    for part in (part for linear in linears for part in linear.parts):
        found[f"{part.module}.lora_A"] = (rank, part.inputs)
        found[f"{part.module}.lora_B"] = (part.outputs, rank)
    return found


def embedding(arch: Architecture, targets: Sequence[str]) -> list[AdaptedLinear]:
    """Return the embedding if it has an adapter, else nothing."""
    if EMBEDDING not in targets:
        return []
    part = AdapterPart(EMBEDDING, f"model.{EMBEDDING}", arch.vocab_size, arch.hidden_size)
    return [AdaptedLinear("embedding.word_embeddings", (part,), "vocab")]


def is_of_embedding(name: str) -> bool:
    """Return whether a matrix is the embedding's, by its layer's name with lora_A or lora_B."""
    return name.split(".")[-2] == EMBEDDING


def every_linear(arch: Architecture, targets: Sequence[str], layer: int) -> Iterator[AdaptedLinear]:
    """Yield the linear layers with adapters of a layer, which is counted from 0 over all stages, and of its experts."""
    yield from adapted_linears(arch, targets, layer)
    if arch.has_experts(layer) and arch.experts is not None:
        for expert in range(arch.experts.count):
            yield from expert_linears(arch, targets, layer, expert)


def kinds(arch: Architecture, targets: Sequence[str], layer: int) -> list[AdaptedLinear]:
    """Return what :func:`every_linear` yields of a layer, but of its experts, which are alike, those of the first."""
    experts = expert_linears(arch, targets, layer, 0) if arch.has_experts(layer) else []
    return adapted_linears(arch, targets, layer) + experts


def examples(arch: Architecture) -> list[int]:
    """Return a layer of each kind that a model has: without experts, and with them."""
    found = {arch.has_experts(layer): layer for layer in reversed(range(arch.num_layers))}
    return sorted(found.values())


def adapted_linears(arch: Architecture, targets: Sequence[str], layer: int) -> list[AdaptedLinear]:
    """Return the linear layers with adapters of a layer, but for those of experts that a router chooses."""
    hidden, size, theirs = arch.hidden_size, arch.head_dim, f"model.layers.{layer}"
    queries, keys = arch.num_attention_heads * size, arch.num_key_value_heads * size
    places: dict[str, _Place] = {
        "q_proj": ("self_attention.linear_qkv", "qkv", f"{theirs}.self_attn", hidden, queries),
        "k_proj": ("self_attention.linear_qkv", "qkv", f"{theirs}.self_attn", hidden, keys),
        "v_proj": ("self_attention.linear_qkv", "qkv", f"{theirs}.self_attn", hidden, keys),
        "o_proj": ("self_attention.linear_proj", "columns", f"{theirs}.self_attn", queries, hidden),
    }
    if not arch.has_experts(layer):
        places |= _mlp("mlp.", f"{theirs}.mlp", hidden, arch.ffn_hidden_size)
    elif arch.experts is not None and arch.experts.shared_ffn_hidden_size:
        shared = arch.experts.shared_ffn_hidden_size
        places |= _mlp("mlp.shared_experts.", f"{theirs}.mlp.shared_expert", hidden, shared)
    return _linears(targets, places)


def expert_linears(arch: Architecture, targets: Sequence[str], layer: int, expert: int) -> list[AdaptedLinear]:
    """Return the linear layers with adapters of one expert of a layer."""
    assert arch.experts is not None
    block = "block_sparse_moe" if arch.family == _MIXTRAL_FAMILY else "mlp"
    theirs = f"model.layers.{layer}.{block}.experts.{expert}"
    places = _mlp("", theirs, arch.hidden_size, arch.experts.ffn_hidden_size)
    return [
        replace(
            linear,
            expert=expert,
            parts=tuple(replace(part, module=f"{theirs}.{_last(arch, part.target)}") for part in linear.parts),
        )
        for linear in _linears(targets, places)
    ]


_Place = tuple[str, str, str, int, int]  # path, cut, the block at Hugging Face, inputs, outputs


def _mlp(mine: str, theirs: str, hidden: int, ffn: int) -> dict[str, _Place]:
    return {
        "gate_proj": (f"{mine}linear_fc1", "gate_up", theirs, hidden, ffn),
        "up_proj": (f"{mine}linear_fc1", "gate_up", theirs, hidden, ffn),
        "down_proj": (f"{mine}linear_fc2", "columns", theirs, ffn, hidden),
    }


def _linears(targets: Sequence[str], places: Mapping[str, _Place]) -> list[AdaptedLinear]:
    found: dict[tuple[str, str], list[AdapterPart]] = {}
    for target in (name for name in chosen(targets) if name in places):
        path, cut, block, inputs, outputs = places[target]
        part = AdapterPart(target, f"{block}.{target}", inputs, outputs)
        found.setdefault((path, cut), []).append(part)
    return [AdaptedLinear(path, tuple(parts), cut) for (path, cut), parts in found.items()]


def _last(arch: Architecture, target: str) -> str:
    """Return the last part of the name that a target has in this family of models, whose MLPs are all alike."""
    return TO_MIXTRAL.get(target, target) if arch.family == _MIXTRAL_FAMILY else target
