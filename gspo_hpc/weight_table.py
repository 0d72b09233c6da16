"""Which Hugging Face tensors make which Megatron parameter, and how it is cut over ranks: both ways, on plain tensors.

Floor 2. Layout of Megatron's fused tensors (rows): ``linear_qkv`` holds, for every key/value group, its query heads,
its key head, its value head; ``linear_fc1`` holds a rank's gate rows, then its up rows. Experts are on expert-parallel
ranks in their order, equally many on each, and cut over expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gspo_hpc.model_config import Architecture

_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: its name in the stage, the Hugging Face tensors it holds, and its cut.

    cut: "none" (replicated), "columns" (dim 1), "vocab" (rows, padded), "qkv", "gate_up".
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the Hugging Face tensors
    cut: str
    expert: int | None = None  # of all of its layer, if it is one's: then only some ranks of a stage have it


def padded_vocab_size(arch: Architecture, tp_size: int) -> int:
    """The vocabulary rounded up so that every TP rank holds the same number of rows."""
    return -(-arch.vocab_size // tp_size) * tp_size


def stage_table(
    arch: Architecture,
    first_layer: int,
    num_layers: int,
    first: bool,
    last: bool,
    ep_size: int = 1,
    fused: bool = False,
) -> list[Entry]:
    """All parameters of a pipeline stage that holds layers [first_layer, first_layer + num_layers).

    Those of experts have the names that they have on their rank of `ep_size` expert-parallel ones. `fused`: names are
    those of Transformer Engine's layers.
    """
    hidden, vocab = (arch.hidden_size,), (arch.vocab_size, arch.hidden_size)
    table = (
        [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), "vocab")] if first else []
    )
    for index in range(num_layers):
        layer = first_layer + index
        mine, theirs = f"decoder.layers.{index}", f"model.layers.{layer}"
        table.append(Entry(f"{mine}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), (hidden,), "none"))
        table += _attention(arch, f"{mine}.self_attention", f"{theirs}.self_attn")
        norm = f"{theirs}.post_attention_layernorm.weight"
        table.append(Entry(f"{mine}.pre_mlp_layernorm.weight", (norm,), (hidden,), "none"))
        if arch.has_experts(layer):
            table += _experts(arch, f"{mine}.mlp", theirs, ep_size)
        else:
            table += _mlp(arch, f"{mine}.mlp", f"{theirs}.mlp", _MLP, arch.ffn_hidden_size)
    if last:
        table.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), "none"))
        if arch.tie_word_embeddings and not first:
            table.append(Entry("output_layer.weight", ("model.embed_tokens.weight",), (vocab,), "vocab"))
        if not arch.tie_word_embeddings:
            table.append(Entry("output_layer.weight", ("lm_head.weight",), (vocab,), "vocab"))
    if fused:
        dense = {f"decoder.layers.{i}" for i in range(num_layers) if not arch.has_experts(first_layer + i)}
        table = [replace(entry, name=_fused_name(entry.name, dense)) for entry in table]
    return table


def _fused_name(name: str, dense: set[str]) -> str:
    """The name of the parameter where norms are joined with the product behind them, and experts with one another."""
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


def _attention(arch: Architecture, mine: str, theirs: str) -> list[Entry]:
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim

    def three(kind: str, *tail: int) -> Entry:
        names = tuple(f"{theirs}.{which}_proj.{kind}" for which in "qkv")
        return Entry(f"{mine}.linear_qkv.{kind}", names, ((queries, *tail), (keys, *tail), (keys, *tail)), "qkv")

    table = [three("weight", arch.hidden_size)]
    if arch.qkv_bias:
        table.append(three("bias"))
    for q_or_k in "qk" if arch.qk_norm else "":
        name = f"{theirs}.{q_or_k}_norm.weight"
        table.append(Entry(f"{mine}.{q_or_k}_layernorm.weight", (name,), ((arch.head_dim,),), "none"))
    shape = (arch.hidden_size, queries)
    return [*table, Entry(f"{mine}.linear_proj.weight", (f"{theirs}.o_proj.weight",), (shape,), "columns")]


def _mlp(
    arch: Architecture, mine: str, theirs: str, names: Sequence[str], ffn: int, expert: int | None = None
) -> list[Entry]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    wide, high = (ffn, arch.hidden_size), (arch.hidden_size, ffn)
    return [
        Entry(f"{mine}.linear_fc1.weight", (gate, up), (wide, wide), "gate_up", expert),
        Entry(f"{mine}.linear_fc2.weight", (down,), (high,), "columns", expert),
    ]


def _experts(arch: Architecture, mine: str, layer: str, ep_size: int) -> list[Entry]:
    assert arch.experts is not None
    count, ffn, hidden = arch.experts.count, arch.experts.ffn_hidden_size, arch.hidden_size
    mixtral = arch.family == "MixtralForCausalLM"
    theirs, names = (f"{layer}.block_sparse_moe", _MIXTRAL) if mixtral else (f"{layer}.mlp", _MLP)
    table = [Entry(f"{mine}.router.weight", (f"{theirs}.gate.weight",), ((count, hidden),), "none")]
    if arch.experts.shared_ffn_hidden_size:
        shared = arch.experts.shared_ffn_hidden_size
        gate = (f"{theirs}.shared_expert_gate.weight",)
        table.append(Entry(f"{mine}.shared_experts.gate_weight", gate, ((1, hidden),), "none"))
        table += _mlp(arch, f"{mine}.shared_experts", f"{theirs}.shared_expert", _MLP, shared)
    for expert in range(count):
        place = f"{mine}.experts.local_experts.{expert % (count // ep_size)}"
        table += _mlp(arch, place, f"{theirs}.experts.{expert}", names, ffn, expert)
    return table


def to_shard(entry: Entry, tensors: Sequence[torch.Tensor], arch: Architecture, rank: int, size: int) -> torch.Tensor:
    """Rank `rank` of `size`'s shard of one parameter, from its full Hugging Face tensors."""
    if entry.cut == "none":
        return tensors[0]
    if entry.cut == "columns":
        return tensors[0].chunk(size, 1)[rank]
    if entry.cut == "gate_up":
        return torch.cat([tensor.chunk(size, 0)[rank] for tensor in tensors])
    if entry.cut == "vocab":
        rows = padded_vocab_size(arch, size) // size
        part = tensors[0][rank * rows : (rank + 1) * rows]
        if part.shape[0] < rows:  # the last rank's padding rows
            part = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
        return part
    assert entry.cut == "qkv", entry
    groups, dim = arch.num_key_value_heads, arch.head_dim
    tail = tensors[0].shape[1:]
    split = [tensor.reshape(groups, -1, *tail) for tensor in tensors]  # per group: queries, key, value rows
    assert split[1].shape[1] == split[2].shape[1] == dim
    return torch.cat(split, dim=1).chunk(size, 0)[rank].reshape(-1, *tail)


def shard_shape(entry: Entry, arch: Architecture, size: int) -> tuple[int, ...]:
    """The shape of each of `size` ranks' shards of one parameter."""
    first, *tail = entry.shapes[0]
    if entry.cut == "none":
        return entry.shapes[0]
    if entry.cut == "columns":
        return (first, tail[0] // size)
    if entry.cut == "vocab":
        return (padded_vocab_size(arch, size) // size, *tail)
    return (sum(shape[0] for shape in entry.shapes) // size, *tail)


def row_pieces(entry: Entry, shard: torch.Tensor) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """(name, full shape, piece of the shard) of each Hugging Face tensor that is the pieces of all ranks, one below the
    other, and then maybe padding; none where the cut is another one."""
    if entry.cut not in ("gate_up", "vocab"):
        return []
    return list(zip(entry.hf, entry.shapes, shard.chunk(len(entry.hf)), strict=True))


def to_hf(entry: Entry, shards: torch.Tensor, arch: Architecture) -> list[tuple[str, torch.Tensor]]:
    """The full Hugging Face tensors of one parameter, from all ranks' shards [size, *shard]: the inverse of
    :func:`to_shard`. They may be views of the shards."""
    if entry.cut == "none":
        return [(entry.hf[0], shards[0])]
    if entry.cut == "columns":
        return [(entry.hf[0], shards.transpose(0, 1).reshape(entry.shapes[0]))]
    if entry.cut == "vocab":
        return [(entry.hf[0], shards.flatten(0, 1)[: arch.vocab_size])]
    tail = shards.shape[2:]
    if entry.cut == "gate_up":
        halves = shards.unflatten(1, (2, -1)).unbind(1)
    else:
        dim = arch.head_dim
        queries = arch.num_attention_heads // arch.num_key_value_heads * dim
        groups = shards.unflatten(1, (-1, queries + 2 * dim))
        halves = groups.split([queries, dim, dim], dim=2)
    return [(name, half.reshape(-1, *tail)) for name, half in zip(entry.hf, halves, strict=True)]
