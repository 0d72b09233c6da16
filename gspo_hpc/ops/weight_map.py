"""The mapping between Hugging Face tensors and the shards of Megatron's parameters, both ways, on plain tensors.

Rows of Megatron's fused tensors: ``linear_qkv`` holds, for every key/value group, its query heads, its key head and its
value head, and every rank has equally many of these rows: with more ranks than groups a part of a group, and ranks
gather the products. ``linear_fc1`` holds a rank's gate rows, then its up rows. Experts are on expert-parallel ranks in
their order, equally many on each, and are split over expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import WeightMapping


def padded_vocab_size(arch: Architecture, tp_size: int) -> int:
    """Return the vocabulary's size, rounded up so that every TP rank holds the same number of rows."""
    return -(-arch.vocab_size // tp_size) * tp_size


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
