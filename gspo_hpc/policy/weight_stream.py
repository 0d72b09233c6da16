"""Hugging Face tensors <-> this rank's Megatron shards: load, stream to engines.

``gspo_hpc.ops.weight_map`` says what belongs where. Loading reads only the tensors a rank needs. Streaming
gathers parameters in buckets of bounded size, each with one collective over the stages and one over the ranks of a
stage that share them, into memory of whoever takes them. Every rank must take part in :func:`stream`.
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
from gspo_hpc.ops.weight_map import (
    WeightMapping,
    needs_whole,
    of_experts,
    shard_shape,
    stage_table,
    to_shard,
    to_views,
)
from gspo_hpc.ops.weight_parts import Memory, Part, Scratch
from gspo_hpc.policy.model import PackedGPTModel
from gspo_hpc.system.progress import mark

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
        mark("loading")  # a tensor of a slow file system may take long
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
    chunks: Sequence[PackedGPTModel], arch: Architecture, memory: Memory | None = None, bucket_bytes: int | None = None
) -> Iterator[list[Part]]:
    """Yield every Hugging Face tensor, full, in a fixed order, on every rank. All ranks must iterate to the end.

    What a part says is true until `memory` gives its place to others; without `memory` until the next parts are asked
    for, and there what no rank shares is a view of the parameters. Beside `memory` this holds nothing: shards are
    gathered in place, at most `bucket_bytes` at once (default: BUCKET_BYTES of the device), but for a parameter that is
    larger by itself. Gloo takes as much again in each of the threads that gather.
    """
    first = next(iter(chunks[0].parameters()))
    limit = bucket_bytes or BUCKET_BYTES[first.device.type]
    over_stages = parallel_state.get_pipeline_model_parallel_group()
    scratch = Scratch(first.device)
    seen: set[str] = set()  # a tied head of the last stage repeats the embedding
    for stage, number, table in _stages(chunks, arch):
        parameters = dict(chunks[number].named_parameters()) if stage == over_stages.rank() else {}
        wanted = [entry for entry in table if entry.hf[0] not in seen]
        for bucket in _buckets(wanted, arch, first.itemsize, limit):
            if memory is None and bucket.group.size() == over_stages.size() == 1:
                for entry in bucket.entries:
                    views = to_views(entry, parameters[entry.name].detach()[None], arch)
                    yield [Part(*part) for part in views]
                continue
            size = bucket.group.size()
            place = (memory or scratch).allocate(size * bucket.length * first.itemsize)
            whole = place.view(first.dtype).view(size, bucket.length)
            mine = whole[bucket.group.rank()]
            if stage == over_stages.rank():
                own = [entry for entry in bucket.entries if _is_mine(entry, arch)]
                torch.cat([parameters[entry.name].detach().reshape(-1) for entry in own], out=mine)
            if over_stages.size() > 1:
                dist.broadcast(mine, dist.get_process_group_ranks(over_stages)[stage], group=over_stages)
            if size > 1:
                _gather(whole, mine, bucket.group)
            yield list(_parts(bucket, whole, arch))
        seen |= {name for entry in table for name in entry.hf}


def _gather(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the parts of all ranks of the group into `whole` [ranks, elements], of which `mine` is this rank's.

    Between CPUs every rank sends its own to every other, straight into its place: gloo's own all-gather copies once
    more, and takes almost twice as long.
    """
    if whole.is_cuda:
        dist.all_gather_into_tensor(whole.view(-1), mine, group=group)  # in place, as FSDP does it
        return
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    under_way = [dist.irecv(whole[rank], group=group, group_src=rank) for rank in others]
    under_way += [dist.isend(mine, group=group, group_dst=rank) for rank in others]
    for work in under_way:
        assert work is not None
        work.wait()


@dataclass(frozen=True)
class _Bucket:
    """Parameters that are gathered together: equally many, of the same shapes, from each rank that has its own.

    `entries` are those of the first such rank, then those of the next, and so on.
    """

    entries: list[WeightMapping]
    shapes: list[tuple[int, ...]]  # of the shards of one rank
    group: dist.ProcessGroup
    owners: int  # ranks with parameters of their own; the others of `group` have parts of the same ones

    @property
    def length(self) -> int:
        """The elements of one rank."""
        return sum(math.prod(shape) for shape in self.shapes)


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
        alone = [needs_whole(entry, arch, tp) for entry in entries[:each]]
        for begin, end in _runs(entries[:each], [math.prod(s) * itemsize * group.size() for s in shapes], alone, limit):
            chosen = [one for owner in range(owners) for one in entries[owner * each + begin : owner * each + end]]
            yield _Bucket(chosen, shapes[begin:end], group, owners)


def _runs(
    entries: Sequence[WeightMapping], sizes: Sequence[int], alone: Sequence[bool], limit: int
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of entries that have together at most `limit` bytes, if they are several.

    Experts are not cut in two, and what has to be alone is.
    """
    begin = used = at = 0
    units = [place if entry.expert is None else entry.expert for place, entry in enumerate(entries)]
    for _, unit in itertools.groupby(range(len(entries)), units.__getitem__):
        places = list(unit)
        needed = sum(sizes[place] for place in places)
        if begin < at and (used + needed > limit or alone[at] or alone[at - 1]):
            yield begin, at
            begin, used = at, 0
        at, used = places[-1] + 1, used + needed
    yield begin, at


def _parts(bucket: _Bucket, whole: torch.Tensor, arch: Architecture) -> Iterator[Part]:
    """Yield the parts of a bucket that was gathered into `whole` [ranks, elements]; experts' tensors together."""
    lengths = [math.prod(shape) for shape in bucket.shapes]
    if bucket.entries[0].expert is None:
        for entry, shape, shards in zip(bucket.entries, bucket.shapes, whole.split(lengths, dim=1), strict=True):
            yield from (Part(*part) for part in to_views(entry, shards.unflatten(1, shape), arch))
        return
    kinds = sum(entry.expert == bucket.entries[0].expert for entry in bucket.entries)
    experts = tuple(entry.expert for entry in bucket.entries[::kinds] if entry.expert is not None)
    # [owners, ranks that share an expert, experts of an owner, elements of an expert]
    every = whole.view(bucket.owners, -1, len(bucket.shapes) // kinds, sum(lengths[:kinds]))
    several = every.split(lengths[:kinds], dim=3)
    for entry, shape, shards in zip(bucket.entries, bucket.shapes, several, strict=False):
        for name, full, view in to_views(entry, shards.unflatten(3, shape).transpose(1, 2), arch):
            yield Part(of_experts(name, entry.expert), (len(experts), *full), view, experts)


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
