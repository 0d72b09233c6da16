"""Hugging Face tensors <-> this rank's Megatron shards: load, stream to engines.

``gspo_hpc.ops.weight_map`` says what belongs where. Loading reads only the tensors a rank needs. Streaming
gathers parameters in buckets of bounded size, each with one collective over the stages and one over the ranks of a
stage that share them, so the extra memory is that of a bucket. Every rank must take part in :func:`stream`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gspo_hpc.config.constants import GATHER_BUCKET_BYTES
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops.hf_folder import Folder
from gspo_hpc.ops.weight_map import WeightMapping, row_pieces, shard_shape, stage_table, to_hf, to_shard
from gspo_hpc.policy.model import PackedGPTModel

BUCKET_BYTES = GATHER_BUCKET_BYTES  # that are gathered at once, by device


def _table(model: PackedGPTModel, arch: Architecture) -> list[WeightMapping]:
    return stage_table(
        arch,
        get_transformer_layer_offset(model.config, model.vp_stage),
        len(model.decoder.layers),
        model.pre_process,
        model.post_process,
        parallel_state.get_expert_model_parallel_world_size(),
        model.fused,
    )


@torch.no_grad()
def load(chunks: Sequence[PackedGPTModel], arch: Architecture, folder: str | Path) -> None:
    """Fill this rank's shards from a Hugging Face folder; ValueError for missing, unknown or misshapen tensors."""
    source = Folder(folder)
    every = stage_table(arch, 0, arch.num_layers, True, True)
    known = {name for entry in every for name in entry.hf} | {"lm_head.weight"}  # tied heads may be stored too
    unknown = sorted(name for name in source.names() - known if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ValueError(f"model.path {folder}: {len(unknown)} tensors have no place in the model: {unknown[:3]}")
    dense = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    expert = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    every_parameter = [dict(chunk.named_parameters()) for chunk in chunks]
    here = [(entry, number) for number, chunk in enumerate(chunks) for entry in _table(chunk, arch)]
    for entry, number in here:
        if not _is_mine(entry, arch):
            continue
        tensors = [source.read(name) for name in entry.hf]
        shard = to_shard(entry, tensors, arch, *(dense if entry.expert is None else expert))
        parameter = every_parameter[number].pop(entry.name)
        if parameter.shape != shard.shape:
            raise ValueError(
                f"model.path {folder}: {entry.hf[0]} gives {tuple(shard.shape)}, config.json says "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(shard)
    assert not any(every_parameter), f"parameters without a rule: {every_parameter}"


def _is_mine(entry: WeightMapping, arch: Architecture) -> bool:
    """Return True if this rank has a part of the parameter, which is one of its stage."""
    if entry.expert is None:
        return True
    assert arch.experts is not None
    per_rank = arch.experts.count // parallel_state.get_expert_model_parallel_world_size()
    return entry.expert // per_rank == parallel_state.get_expert_model_parallel_rank()


@torch.no_grad()
def stream(
    chunks: Sequence[PackedGPTModel], arch: Architecture, bucket_bytes: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor, full, in a fixed order, on every rank. All ranks must iterate to the end.

    A tensor may be a view of a parameter, or of memory that the ones after it are gathered into: use or copy it before
    the next is asked for. Beside what is yielded, this holds two buckets: a rank's own part of what it gathers, and the
    parts of all; `bucket_bytes` (default: BUCKET_BYTES of the device) is what the second may have, but for a parameter
    that is larger by itself. Gloo takes as much again in each of the threads that gather.
    """
    first = next(iter(chunks[0].parameters()))
    bucket_bytes = bucket_bytes or BUCKET_BYTES[first.device.type]
    buffers = _Buffers(first.dtype, first.device, bucket_bytes // first.itemsize)
    stages = _stages(chunks, arch)
    my_stage = parallel_state.get_pipeline_model_parallel_rank()
    over_stages = parallel_state.get_pipeline_model_parallel_group()
    seen: set[str] = set()  # a tied head of the last stage repeats the embedding
    for stage, number, table in stages:
        source = dist.get_process_group_ranks(over_stages)[stage]
        parameters = dict(chunks[number].named_parameters())
        wanted = [entry for entry in table if entry.hf[0] not in seen]
        for bucket in _buckets(wanted, arch, first.itemsize, bucket_bytes):
            shapes, size = bucket.shapes, bucket.group.size()
            if size == 1 and over_stages.size() == 1:
                for entry in bucket.entries:
                    yield from to_hf(entry, parameters[entry.name].detach()[None], arch)
                continue
            lengths = [math.prod(shape) for shape in shapes]
            own = [entry for entry in bucket.entries if stage == my_stage and _is_mine(entry, arch)]
            if len(own) == 1:  # as it is
                mine = parameters[own[0].name].detach().view(-1)
            else:
                mine = buffers.mine(sum(lengths), size)
                for entry, part in zip(own, mine.split(lengths), strict=False):
                    part.view_as(parameters[entry.name]).copy_(parameters[entry.name])
            if over_stages.size() > 1:
                dist.broadcast(mine, source, group=over_stages)
            whole = mine[None]
            rows = row_pieces(bucket.entries[0], mine.view(shapes[0])) if size > 1 and len(bucket.entries) == 1 else ()
            for name, shape, piece in rows:  # gathered by itself, it is whole where it comes to lie
                gathered = buffers.whole(size * piece.numel())
                _gather(gathered, piece.view(-1), bucket.group)
                yield name, gathered.view(-1, *shape[1:])[: shape[0]]
            if rows:
                continue
            if size > 1:
                whole = buffers.whole(size * sum(lengths))
                _gather(whole, mine, bucket.group)
                whole = whole.view(size, -1)
            for position, part in enumerate(whole.split(lengths, dim=1)):
                shards = part.unflatten(1, shapes[position])
                for owner, entry in enumerate(bucket.entries[position :: len(shapes)]):
                    yield from to_hf(entry, shards[owner * bucket.tp : (owner + 1) * bucket.tp], arch)
        seen |= {name for entry in table for name in entry.hf}


def _gather(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the parts of all ranks of the group into `whole`, one after the other.

    Between CPUs every rank sends its own to every other, straight into its place: gloo's own all-gather copies once
    more, and takes almost twice as long.
    """
    if whole.is_cuda:
        dist.all_gather_into_tensor(whole, mine, group=group)
        return
    parts, others = whole.view(group.size(), -1), [rank for rank in range(group.size()) if rank != group.rank()]
    under_way = [dist.irecv(parts[rank], group=group, group_src=rank) for rank in others]
    under_way += [dist.isend(mine, group=group, group_dst=rank) for rank in others]
    parts[group.rank()].copy_(mine)
    for work in under_way:
        assert work is not None
        work.wait()


@dataclass(frozen=True)
class _Bucket:
    """Parameters that are gathered together.

    They are the entries of rank 0 of `group`, with their shapes, then those of the next rank that has others, and so
    on.
    """

    entries: list[WeightMapping]
    shapes: list[tuple[int, ...]]  # of the shards of each rank, whose number is also that of its entries
    group: dist.ProcessGroup
    tp: int  # ranks that have parts of one and the same parameter


def _buckets(table: Sequence[WeightMapping], arch: Architecture, itemsize: int, limit: int) -> Iterator[_Bucket]:
    """Yield a stage's parameters, in order: experts apart from the others, since other ranks share them."""
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    kinds = {
        False: (parallel_state.get_tensor_model_parallel_group(), 1),
        True: (parallel_state.get_expert_tensor_and_model_parallel_group(), ep_size),
    }
    for is_expert, run in itertools.groupby(table, lambda entry: entry.expert is not None):
        group, owners = kinds[is_expert]
        tp, entries = group.size() // owners, list(run)
        each = len(entries) // owners  # entries of one rank: those of the next follow
        shapes = [shard_shape(entry, arch, tp) for entry in entries[:each]]
        begin = used = 0
        for end, shape in enumerate([*shapes, None]):
            needed = 0 if shape is None else math.prod(shape) * itemsize * group.size()
            if begin < end and (shape is None or used + needed > limit):
                chosen = [one for owner in range(owners) for one in entries[owner * each + begin : owner * each + end]]
                yield _Bucket(chosen, shapes[begin:end], group, tp)
                begin, used = end, 0
            used += needed


class _Buffers:
    """Memory that buckets are gathered into, kept from one to the next."""

    def __init__(self, dtype: torch.dtype, device: torch.device, usual: int) -> None:
        self._usual = usual  # elements: taken at once, for one place after the other would leave the first ones empty
        self._mine = self._whole = torch.empty(0, dtype=dtype, device=device)

    def mine(self, count: int, share: int) -> torch.Tensor:
        """Return memory for this rank's part, one of `share`."""
        if self._mine.numel() < count:
            self._mine = self._mine.new_empty(max(count, self._usual // share))
        return self._mine[:count]

    def whole(self, count: int) -> torch.Tensor:
        """Return memory for the parts of all ranks."""
        if self._whole.numel() < count:
            self._whole = self._whole.new_empty(max(count, self._usual))
        return self._whole[:count]


def _stages(chunks: Sequence[PackedGPTModel], arch: Architecture) -> list[tuple[int, int, list[WeightMapping]]]:
    """Return (pipeline rank, number of its chunk, its entries) of the whole model, in order, on every rank."""
    group = parallel_state.get_pipeline_model_parallel_group()
    layers = torch.zeros(len(chunks), group.size(), 2, dtype=torch.int64, device=next(chunks[0].parameters()).device)
    for number, chunk in enumerate(chunks):
        mine = (get_transformer_layer_offset(chunk.config, chunk.vp_stage), len(chunk.decoder.layers))
        layers[number, group.rank()] = torch.tensor(mine)
    dist.all_reduce(layers, group=group)
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    places = [(rank, number) for number in range(len(chunks)) for rank in range(group.size())]
    stages = []
    for place in places:
        rank, number = place
        first, count = layers[number, rank].tolist()
        table = stage_table(arch, first, count, place == places[0], place == places[-1], ep_size, chunks[0].fused)
        stages.append((rank, number, table))
    return stages
