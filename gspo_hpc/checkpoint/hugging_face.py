"""Convert Hugging Face folders to sharded checkpoints and back, a layer at a time, in the memory of one layer.

The model is built without values, for its names and shapes only: memory that nobody writes to is never taken. One rank
converts; the checkpoint that it reads or writes can be that of any layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gspo_hpc.checkpoint import compat, index, sharded
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import WeightMapping, stage_table
from gspo_hpc.ops import hf_folder
from gspo_hpc.ops.weight_map import to_hf, to_shard
from gspo_hpc.policy.model import PackedGPTModel, build
from gspo_hpc.system import malloc
from gspo_hpc.system.files import Entry


def to_hugging_face(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the weights in `shards` (a checkpoint's folder `megatron`) as a Hugging Face folder, whole or not at all.

    `config` describes a run of one rank: its `model.path` gives the configuration and the tokenizer, and its
    `model.dtype` is the dtype of the shards. Raises ValueError where the shards are those of another model.
    """
    model = _hollow(arch, config)
    table = stage_table(arch, 0, arch.num_layers, True, True)
    shapes = [pair for entry in table for pair in zip(entry.hf, entry.shapes, strict=True)]
    tensors = _loaded(shards, model, table, arch)
    with malloc.freed_memory_goes_back():
        hf_folder.write(out, str(config.model.path), shapes, model.config.params_dtype, tensors)


def from_hugging_face(arch: Architecture, config: Config, shards: Path) -> dict[str, Entry]:
    """Write the weights of `config.model.path` into the empty folder `shards`; return size and hash of each file.

    `config` describes a run of one rank, and tensors are converted to its `model.dtype`. The result is what
    :func:`gspo_hpc.runs.commit.commit` takes as `known`. Raises ValueError where the folder's shapes do not fit.
    """
    model = _hollow(arch, config)
    source = hf_folder.Folder(str(config.model.path))
    parameters = dict(model.named_parameters())
    places = {
        parameters[entry.name].untyped_storage().data_ptr(): (parameters[entry.name], entry)
        for entry in stage_table(arch, 0, arch.num_layers, True, True)
    }

    def fill(hollow: torch.Tensor) -> torch.Tensor:
        """Return the values of `hollow`, a parameter or a view of a part of one."""
        parameter, entry = places[hollow.untyped_storage().data_ptr()]
        tensors = [source.read(name) for name in entry.hf]
        whole = to_shard(entry, tensors, arch, 0, 1).to(parameter.dtype).contiguous()
        if whole.shape != parameter.shape:
            shapes = f"{tuple(whole.shape)}, but config.json says {tuple(parameter.shape)}"
            raise ValueError(f"model.path {source.path}: {entry.hf[0]} has the wrong shape: {shapes}")
        return whole.as_strided(hollow.shape, hollow.stride(), hollow.storage_offset() - parameter.storage_offset())

    written: dict[str, Entry] = {}
    group = dist.new_group(backend="gloo")
    state = {"model": {"0": model.sharded_state_dict()}}
    with malloc.freed_memory_goes_back():
        compat.prepare(state, shards, group, written, planner=compat.FillingPlanner(fill))()
    return written


def dtype_of(shards: Path) -> str:
    """Return the dtype of the weights in a checkpoint's folder `megatron`; ValueError where it has none."""
    places = index.read(shards).state_dict_metadata
    found = next((at for key, at in places.items() if key.startswith("embedding.") or key.endswith(".lora_A")), None)
    if not isinstance(found, TensorStorageMetadata):
        raise ValueError(f"{shards} holds no sharded weights")
    return str(found.properties.dtype).removeprefix("torch.")


def _hollow(arch: Architecture, config: Config) -> PackedGPTModel:
    (model,) = build(arch, config, torch.device("cpu"))
    return model


class _Pieces(torch_checkpoint.DefaultLoadPlanner):
    """A planner that loads pieces of a checkpoint's tensors, each into memory that is given for it."""

    def __init__(self, places: Iterable[ShardedTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        for place in places:
            size = (*[1] * place.prepend_axis_num, *place.local_shape)
            self._memory[place.key, tuple(place.global_offset)] = place.data.view(size)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for (key, offset), memory in self._memory.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            piece = ChunkStorageMetadata(torch.Size(offset), memory.shape)
            items += create_read_items_for_chunk_list(key, stored, [piece])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._memory[index.fqn, tuple(index.offset)]


def _loaded(
    shards: Path, model: PackedGPTModel, table: list[WeightMapping], arch: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    places = model.sharded_state_dict()
    reader = compat.Reader(shards)
    _refuse_others(places, reader.read_metadata(), shards)
    for _, entries in itertools.groupby(table, _part):
        group = list(entries)
        values = {entry.name: torch.empty_like(places[entry.name].data) for entry in group}
        wanted: list[ShardedTensor] = []
        for entry in group:
            place = replace(places[entry.name], data=values[entry.name])
            wanted += _pieces(place)
        compat.read({}, reader, _Pieces(wanted))
        for entry in group:
            yield from to_hf(entry, values[entry.name][None], arch)


def _pieces(place: Any) -> list[ShardedTensor]:
    """Return the sharded tensors that Megatron saves for one parameter, over the same memory."""
    return list(nested_values(place.build())) if isinstance(place, ShardedTensorFactory) else [place]


def _refuse_others(places: Mapping[str, Any], stored: Metadata, shards: Path) -> None:
    """Raise ValueError where the checkpoint is that of another model."""
    weights = [place for place in places.values() if isinstance(place, ShardedTensor | ShardedTensorFactory)]
    wanted = {one.key: one for place in weights for one in _pieces(place)}
    there = {
        key: tuple(found.size)
        for key, found in stored.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not key.startswith(("optimizer.", sharded.REFERENCE))
    }
    for key in sorted(wanted.keys() | there.keys()):
        ours = tuple(wanted[key].global_shape) if key in wanted else None
        # The vocabulary is padded to equally many rows on each of the ranks that saved.
        same = ours == there.get(key) or (ours and key in there and wanted[key].allow_shape_mismatch)
        if not same:
            has = f"of shape {there[key]}" if key in there else "missing"
            raise ValueError(
                f"{shards} is the checkpoint of another model: {key} is {has} there, and config.json needs "
                + ("no such weight" if ours is None else f"shape {ours}")
            )


def _part(entry: WeightMapping) -> str:
    """Return the name of the part that a parameter is loaded with: its layer, or its expert where it has one."""
    words = entry.name.split(".")
    return ".".join(words[:6] if entry.expert is not None else words[:3])
