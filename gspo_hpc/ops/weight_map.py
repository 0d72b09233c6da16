"""The mapping between Hugging Face tensors and the shards of Megatron's parameters, both ways, on plain tensors.

Rows of Megatron's fused tensors: ``linear_qkv`` holds, for every key/value group, its query heads, its key head and its
value head, and every rank has equally many of these rows: with more ranks than groups a part of a group, and ranks
gather the products. ``linear_fc1`` holds a rank's gate rows, then its up rows. Experts are on expert-parallel ranks in
their order, equally many on each, and are split over expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gspo_hpc.models.architecture import Architecture

_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


@dataclass(frozen=True)
class WeightMapping:
    """One Megatron parameter: its name in the stage, the Hugging Face tensors that it holds, and how it is split.

    `cut` is "none" (replicated), "columns" (dim 1), "vocab" (rows, padded), "qkv" or "gate_up" (rows of each tensor).
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # shapes of the Hugging Face tensors
    cut: str
    expert: int | None = (
        None  # its expert's number in the layer, if it has one: then only some ranks of a stage hold it
    )


def padded_vocab_size(arch: Architecture, tp_size: int) -> int:
    """Return the vocabulary's size, rounded up so that every TP rank holds the same number of rows."""
    return -(-arch.vocab_size // tp_size) * tp_size


def stage_table(
    arch: Architecture,
    first_layer: int,
    num_layers: int,
    first: bool,
    last: bool,
    ep_size: int = 1,
    fused: bool = False,
) -> list[WeightMapping]:
    """Return all parameters of a pipeline stage that holds layers [first_layer, first_layer + num_layers).

    `first` and `last` say that the stage has the embedding, and the output layer. Experts have the names that they have
    on their rank of `ep_size` expert-parallel ones. With `fused`, names are those of Transformer Engine's layers.
    """
    hidden, vocab = (arch.hidden_size,), (arch.vocab_size, arch.hidden_size)
    table = (
        [WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), "vocab")]
        if first
        else []
    )
    for index in range(num_layers):
        layer = first_layer + index
        mine, theirs = f"decoder.layers.{index}", f"model.layers.{layer}"
        table.append(
            WeightMapping(f"{mine}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), (hidden,), "none")
        )
        table += _attention(arch, f"{mine}.self_attention", f"{theirs}.self_attn")
        norm = f"{theirs}.post_attention_layernorm.weight"
        table.append(WeightMapping(f"{mine}.pre_mlp_layernorm.weight", (norm,), (hidden,), "none"))
        if arch.has_experts(layer):
            table += _experts(arch, f"{mine}.mlp", theirs, ep_size)
        else:
            table += _mlp(arch, f"{mine}.mlp", f"{theirs}.mlp", _MLP, arch.ffn_hidden_size)
    if last:
        table.append(WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), "none"))
        if arch.tie_word_embeddings and not first:
            table.append(WeightMapping("output_layer.weight", ("model.embed_tokens.weight",), (vocab,), "vocab"))
        if not arch.tie_word_embeddings:
            table.append(WeightMapping("output_layer.weight", ("lm_head.weight",), (vocab,), "vocab"))
    if fused:
        dense = {f"decoder.layers.{i}" for i in range(num_layers) if not arch.has_experts(first_layer + i)}
        table = [replace(mapping, name=_fused_name(mapping.name, dense)) for mapping in table]
    return table


def _fused_name(name: str, dense: set[str]) -> str:
    """Return a parameter's name where norms are fused with the matrix product behind them, and experts are grouped."""
    layer, _, rest = name.partition(".input_layernorm.")
    if rest:
        return f"{layer}.self_attention.linear_qkv.layer_norm_{rest}"
    layer, _, rest = name.partition(".pre_mlp_layernorm.")
    if rest and layer in dense:
        return f"{layer}.mlp.linear_fc1.layer_norm_{rest}"
    layer, _, rest = name.partition(".local_experts.")
    if rest:
        number, product, kind = rest.split(".")
        return f"{layer}.{product}.{kind}{number}"
    return name


def _attention(arch: Architecture, mine: str, theirs: str) -> list[WeightMapping]:
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim

    def three(kind: str, *tail: int) -> WeightMapping:
        names = tuple(f"{theirs}.{which}_proj.{kind}" for which in "qkv")
        return WeightMapping(
            f"{mine}.linear_qkv.{kind}", names, ((queries, *tail), (keys, *tail), (keys, *tail)), "qkv"
        )

    table = [three("weight", arch.hidden_size)]
    if arch.qkv_bias:
        table.append(three("bias"))
    for q_or_k in "qk" if arch.qk_norm else "":
        name = f"{theirs}.{q_or_k}_norm.weight"
        table.append(WeightMapping(f"{mine}.{q_or_k}_layernorm.weight", (name,), ((arch.head_dim,),), "none"))
    shape = (arch.hidden_size, queries)
    return [*table, WeightMapping(f"{mine}.linear_proj.weight", (f"{theirs}.o_proj.weight",), (shape,), "columns")]


def _mlp(
    arch: Architecture, mine: str, theirs: str, names: Sequence[str], ffn: int, expert: int | None = None
) -> list[WeightMapping]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    wide, high = (ffn, arch.hidden_size), (arch.hidden_size, ffn)
    return [
        WeightMapping(f"{mine}.linear_fc1.weight", (gate, up), (wide, wide), "gate_up", expert),
        WeightMapping(f"{mine}.linear_fc2.weight", (down,), (high,), "columns", expert),
    ]


def _experts(arch: Architecture, mine: str, layer: str, ep_size: int) -> list[WeightMapping]:
    assert arch.experts is not None
    count, ffn, hidden = arch.experts.count, arch.experts.ffn_hidden_size, arch.hidden_size
    mixtral = arch.family == "MixtralForCausalLM"
    theirs, names = (f"{layer}.block_sparse_moe", _MIXTRAL) if mixtral else (f"{layer}.mlp", _MLP)
    table = [WeightMapping(f"{mine}.router.weight", (f"{theirs}.gate.weight",), ((count, hidden),), "none")]
    if arch.experts.shared_ffn_hidden_size:
        shared = arch.experts.shared_ffn_hidden_size
        gate = (f"{theirs}.shared_expert_gate.weight",)
        table.append(WeightMapping(f"{mine}.shared_experts.gate_weight", gate, ((1, hidden),), "none"))
        table += _mlp(arch, f"{mine}.shared_experts", f"{theirs}.shared_expert", _MLP, shared)
    for expert in range(count):
        place = f"{mine}.experts.local_experts.{expert % (count // ep_size)}"
        table += _mlp(arch, place, f"{theirs}.experts.{expert}", names, ffn, expert)
    return table


def to_shard(
    mapping: WeightMapping, tensors: Sequence[torch.Tensor], arch: Architecture, rank: int, size: int
) -> torch.Tensor:
    """Return the shard of one parameter on rank `rank` of `size`, from its full Hugging Face tensors."""
    if mapping.cut == "none":
        return tensors[0]
    if mapping.cut == "columns":
        return tensors[0].chunk(size, 1)[rank]
    if mapping.cut == "gate_up":
        return torch.cat([tensor.chunk(size, 0)[rank] for tensor in tensors])
    if mapping.cut == "vocab":
        rows = padded_vocab_size(arch, size) // size
        part = tensors[0][rank * rows : (rank + 1) * rows]
        if part.shape[0] < rows:  # the last rank's padding rows
            part = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
        return part
    assert mapping.cut == "qkv", mapping
    groups, dim = arch.num_key_value_heads, arch.head_dim
    tail = tensors[0].shape[1:]
    split = [tensor.reshape(groups, -1, *tail) for tensor in tensors]  # per group: queries, key, value rows
    assert split[1].shape[1] == split[2].shape[1] == dim
    return torch.cat(split, dim=1).flatten(0, 1).chunk(size, 0)[rank]


def shard_shape(mapping: WeightMapping, arch: Architecture, size: int) -> tuple[int, ...]:
    """Return the shape of the shard that each of `size` ranks has of one parameter."""
    first, *tail = mapping.shapes[0]
    if mapping.cut == "none":
        return mapping.shapes[0]
    if mapping.cut == "columns":
        return (first, tail[0] // size)
    if mapping.cut == "vocab":
        return (padded_vocab_size(arch, size) // size, *tail)
    return (sum(shape[0] for shape in mapping.shapes) // size, *tail)


def needs_whole(mapping: WeightMapping, arch: Architecture, size: int) -> bool:
    """Return True if the shards of `size` ranks must lie one right after the other to be viewed as one tensor.

    That is where their rows are joined first: padding is cut off at the end, and ranks have parts of groups of heads.
    """
    rows = (arch.num_attention_heads // arch.num_key_value_heads + 2) * arch.head_dim
    return mapping.cut == "vocab" or (mapping.cut == "qkv" and shard_shape(mapping, arch, size)[0] % rows != 0)


def of_experts(name: str, expert: int | None) -> str:
    """Return the name of an expert's tensor with {} in place of the expert's number."""
    before, found, after = name.rpartition(f".{expert}.")
    assert found, name
    return f"{before}.{{}}.{after}"


def to_views(
    mapping: WeightMapping, shards: torch.Tensor, arch: Architecture
) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Return (name, shape, view) of each Hugging Face tensor, from all ranks' shards [..., size, *shard].

    A view has more dimensions than the tensor, and its elements in the same order; it is none where :func:`needs_whole`
    is true and the shards lie apart. The leading dimensions stay in front, those of shape are the tensor's own.
    """
    lead = shards.ndim - 1 - len(mapping.shapes[0])
    if mapping.cut == "none":
        views = [shards.select(lead, 0)]
    elif mapping.cut == "columns":
        views = [shards.transpose(lead, lead + 1)]
    elif mapping.cut == "vocab":
        views = [shards.flatten(lead, lead + 1).narrow(lead, 0, arch.vocab_size)]
    elif mapping.cut == "gate_up":
        views = list(shards.unflatten(lead + 1, (2, -1)).unbind(lead + 1))
    else:
        assert mapping.cut == "qkv", mapping
        dim = arch.head_dim
        queries = arch.num_attention_heads // arch.num_key_value_heads * dim
        if shards.shape[lead + 1] % (queries + 2 * dim):  # each rank has a part of a group
            shards = shards.flatten(lead, lead + 1).unsqueeze(lead)
        groups = shards.unflatten(lead + 1, (-1, queries + 2 * dim))
        views = list(groups.split([queries, dim, dim], dim=lead + 2))
    return list(zip(mapping.hf, mapping.shapes, views, strict=True))


def to_hf(mapping: WeightMapping, shards: torch.Tensor, arch: Architecture) -> list[tuple[str, torch.Tensor]]:
    """Return the full Hugging Face tensors of one parameter, from all ranks' shards [size, *shard].

    This is the inverse of :func:`to_shard`. The tensors may be views of the shards.
    """
    return [(name, view.reshape(shape)) for name, shape, view in to_views(mapping, shards, arch)]
