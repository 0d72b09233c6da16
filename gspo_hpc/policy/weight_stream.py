"""Hugging Face tensors <-> this rank's Megatron shards: load, stream to engines.

``gspo_hpc.models.weight_table`` says what belongs where. Loading reads only the tensors a rank needs. Streaming
gathers parameters in buckets of bounded size, each with one collective over the stages and one over the ranks of a
stage that share them, into memory of whoever takes them. Where one expert of every rank is too much for that memory,
the ranks' experts are gathered in several pieces. Every rank must take part in :func:`stream`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gspo_hpc.config.constants import GATHER_BUCKET_BYTES, TRANSFER_BUCKET_BYTES
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.parts import divide_experts
from gspo_hpc.models.weight_table import WeightMapping, is_extra, stage_table
from gspo_hpc.ops.hf_folder import Folder
from gspo_hpc.ops.weight_map import needs_whole, of_experts, shard_shape, to_shard, to_views
from gspo_hpc.ops.weight_parts import Memory, Part, Scratch
from gspo_hpc.policy.adapters import lora
from gspo_hpc.policy.model import PackedGPTModel
from gspo_hpc.system.progress import mark

BUCKET_BYTES = GATHER_BUCKET_BYTES  # that are gathered at once, by device
PIECE_BYTES = TRANSFER_BUCKET_BYTES  # of experts: more would leave no memory to gather into while an engine loads


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
    """Fill this rank's shards from a Hugging Face folder; ValueError for missing, unknown or misshapen tensors.

    Adapters are left as they are: no folder of a model has any.
    """
    source = Folder(folder)
    every = stage_table(arch, 0, arch.num_layers, True, True)
    known = {name for entry in every for name in entry.hf}
    unknown = sorted(name for name in source.names() - known if not is_extra(name))
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
    every_parameter = [
        {name: one for name, one in chunk.named_parameters() if not lora.is_adapter(name)} for chunk in chunks
    ]
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


def own_experts(chunks: Sequence[PackedGPTModel], arch: Architecture) -> Iterator[tuple[WeightMapping, torch.Tensor]]:
    """Yield this rank's shard of every parameter of an expert that it has, as the model computes with it."""
    for chunk in chunks:
        weights = _Weights(chunk)
        for entry in _table(chunk, arch):
            if entry.expert is not None and _is_mine(entry, arch):
                yield entry, weights[entry.name]


def _is_mine(entry: WeightMapping, arch: Architecture) -> bool:
    """Return True if this rank has a part of the parameter, which is one of its stage."""
    if entry.expert is None:
        return True
    assert arch.experts is not None
    per_rank = arch.experts.count // parallel_state.get_expert_model_parallel_world_size()
    return entry.expert // per_rank == parallel_state.get_expert_model_parallel_rank()


@torch.no_grad()
def stream(
    chunks: Sequence[PackedGPTModel],
    arch: Architecture,
    memory: Memory | None = None,
    bucket_bytes: int | None = None,
    piece_bytes: int | None = None,
) -> Iterator[list[Part]]:
    """Yield every Hugging Face tensor, full, in a fixed order, on every rank. All ranks must iterate to the end.

    What a part says is true until `memory` gives its place to others; without `memory` until the next parts are asked
    for, and there what no rank shares is a view of the parameters. Parameters are gathered together up to
    `bucket_bytes`, one expert of each rank up to `piece_bytes` (defaults: those of the device); a parameter that is
    larger is gathered by itself. Shards are gathered in place, and nothing is held beside `memory`, but for this rank's
    shard of an expert where those of all ranks are more than `piece_bytes`. Gloo takes as much as is gathered again in
    each of the threads that gather.

    Weights are those that the model computes with: adapters are merged into them, one weight at a time, unless they are
    turned off.
    """
    first = next(iter(chunks[0].parameters()))
    device, itemsize = first.device.type, first.itemsize
    most = piece_bytes or PIECE_BYTES[device]
    limit = min(bucket_bytes or BUCKET_BYTES[device], most)
    over_stages = parallel_state.get_pipeline_model_parallel_group()
    stages: list[tuple[int, int, list[_Bucket]]] = []
    seen: set[str] = set()  # a tied head of the last stage repeats the embedding
    for stage, number, table in _stages(chunks, arch):
        wanted = [entry for entry in table if entry.hf[0] not in seen]
        stages.append((stage, number, list(_buckets(wanted, arch, itemsize, limit, most))))
        seen |= {name for entry in table for name in entry.hf}
    in_place = memory is None and over_stages.size() == 1  # what no rank shares
    memory = memory or Scratch(first.device)
    gathered = (one for _, _, buckets in stages for one in buckets if not in_place or one.group.size() > 1)
    memory.reserve(max((bucket.largest * itemsize for bucket in gathered), default=0))
    for stage, number, buckets in stages:
        parameters = _Weights(chunks[number]) if stage == over_stages.rank() else None
        source = dist.get_process_group_ranks(over_stages)[stage] if over_stages.size() > 1 else None
        for bucket in buckets:
            if in_place and bucket.group.size() == 1:
                for entry in bucket.entries:
                    assert parameters is not None
                    views = to_views(entry, parameters[entry.name][None], arch)
                    yield [Part(*part) for part in views]
                continue
            own = None
            if parameters is not None:
                names = [entry.name for entry in bucket.entries if _is_mine(entry, arch)]
                own = functools.partial(parameters.copy, names)
            divided = len(bucket.pieces) > 1
            mine = _shard(first.new_empty(bucket.length), own, source) if divided else None
            for ranks in bucket.pieces:
                place = memory.allocate(len(ranks) * bucket.length * itemsize)
                whole = place.view(first.dtype).view(len(ranks), bucket.length)
                shard = _shard(whole[bucket.group.rank()], own, source) if mine is None else mine
                _gather(whole, shard, bucket.group, ranks)
                yield list(_parts(bucket, ranks, whole, arch))


class _Weights:
    """The weights of a chunk by name, with the adapters of each merged into it."""

    def __init__(self, chunk: PackedGPTModel) -> None:
        self._parameters, self._adapters = dict(chunk.named_parameters()), lora.of_weights(chunk)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, found = self._parameters[name].detach(), self._adapters.get(name)
        return weight if found is None or not found.enabled else found.merged(weight)

    def copy(self, names: Sequence[str], place: torch.Tensor) -> None:
        """Copy some of them into `place` [elements]; with adapters one by one, so that one is merged at a time."""
        if not self._adapters:
            torch.cat([self[name].reshape(-1) for name in names], out=place)
            return
        begin = 0
        for name in names:
            weight = self[name].reshape(-1)
            place[begin : begin + weight.numel()] = weight
            begin += weight.numel()
            del weight  # before there is the next


def _shard(place: torch.Tensor, own: Callable[[torch.Tensor], None] | None, source: int | None) -> torch.Tensor:
    """Return `place` [elements] with this rank's shard of a bucket, which `own` copies, or that of rank `source`.

    `own` is None on the ranks of other stages, which get it from `source`; None: there are no other stages.
    """
    if own is not None:
        own(place)
    if source is not None:
        dist.broadcast(place, source, group=parallel_state.get_pipeline_model_parallel_group())
    return place


def _gather(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, ranks: range) -> None:
    """Gather the shards of these ranks of the group into `whole` [ranks, elements], on all of the group.

    `mine` is this rank's shard, which lies in its place in `whole` if all are gathered. Between CPUs every rank sends
    its own to every other, straight into its place: gloo's own all-gather copies once more, and takes almost twice as
    long.
    """
    if group.size() == 1:
        return
    here, places = group.rank() in ranks, dict(zip(ranks, whole.unbind(), strict=True))
    if whole.is_cuda and len(ranks) == group.size():
        dist.all_gather_into_tensor(whole.view(-1), mine, group=group)  # in place, as FSDP does it
        return
    if whole.is_cuda:  # torch makes one group of broadcasts of it, without those of nothing
        nothing = whole.new_empty(0)
        rows = [places.get(rank, nothing) for rank in range(group.size())]
        dist.all_gather(rows, mine if here else nothing, group=group)
        return
    under_way = [dist.irecv(row, group=group, group_src=rank) for rank, row in places.items() if rank != group.rank()]
    if here:
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        under_way += [dist.isend(mine, group=group, group_dst=rank) for rank in others]
        if places[group.rank()].data_ptr() != mine.data_ptr():
            places[group.rank()].copy_(mine)
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
    pieces: list[range]  # ranks of `group` whose shards are gathered at once

    @property
    def length(self) -> int:
        """The elements of one rank."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def largest(self) -> int:
        """The elements that are gathered at once, at most."""
        return self.length * max(len(ranks) for ranks in self.pieces)


def _buckets(
    table: Sequence[WeightMapping], arch: Architecture, itemsize: int, limit: int, most: int
) -> Iterator[_Bucket]:
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
        sizes = [math.prod(shape) * itemsize * tp for shape in shapes]
        for begin, end in _runs(entries[:each], [size * owners for size in sizes], alone, limit):
            divided = divide_experts(sizes[begin:end], owners, most)
            for (here, there), pieces in itertools.groupby(divided, lambda piece: (piece.begin, piece.end)):
                places = range(begin + here, begin + there)
                chosen = [entries[owner * each + place] for owner in range(owners) for place in places]
                ranks = [range(piece.first * tp, piece.last * tp) for piece in pieces]
                yield _Bucket(chosen, [shapes[place] for place in places], group, owners, ranks)


def _runs(
    entries: Sequence[WeightMapping], sizes: Sequence[int], alone: Sequence[bool], limit: int
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of entries that have together at most `limit` bytes, if they are several.

    An expert's entries stay together here, and what has to be alone is.
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


def _parts(bucket: _Bucket, ranks: range, whole: torch.Tensor, arch: Architecture) -> Iterator[Part]:
    """Yield what was gathered of these ranks into `whole` [ranks, elements]; experts' tensors together."""
    lengths = [math.prod(shape) for shape in bucket.shapes]
    if bucket.entries[0].expert is None:
        for entry, shape, shards in zip(bucket.entries, bucket.shapes, whole.split(lengths, dim=1), strict=True):
            yield from (Part(*part) for part in to_views(entry, shards.unflatten(1, shape), arch))
        return
    sharers, each = bucket.group.size() // bucket.owners, len(bucket.shapes)
    entries = bucket.entries[ranks.start // sharers * each : ranks.stop // sharers * each]
    kinds = sum(entry.expert == entries[0].expert for entry in entries)
    experts = tuple(entry.expert for entry in entries[::kinds] if entry.expert is not None)
    # [owners, ranks that share an expert, experts of an owner, elements of an expert]
    every = whole.view(-1, sharers, each // kinds, sum(lengths[:kinds]))
    several = every.split(lengths[:kinds], dim=3)
    for entry, shape, shards in zip(entries, bucket.shapes, several, strict=False):
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
