"""Hugging Face folders to sharded checkpoints and back, a layer at a time: a process needs the memory of one layer.

Floor 3. The model is built without a value in it, for its names and shapes: what nobody writes to takes no memory. One
rank does it; the checkpoint is that of any layout.
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
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gspo_hpc import heap, hf_folder
from gspo_hpc.checkpoint import InProcess
from gspo_hpc.commit import Entry as Written
from gspo_hpc.config import Config
from gspo_hpc.model import PackedGPTModel, build
from gspo_hpc.model_config import Architecture
from gspo_hpc.weight_table import Entry, stage_table, to_hf, to_shard


def to_hugging_face(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the weights in `shards` (a checkpoint's folder `megatron`) as a Hugging Face folder, whole or not at all.

    `config`: of one rank. Its `model.path` gives the configuration and tokenizer, its `model.dtype` is the shards'.
    """
    model = _hollow(arch, config)
    table = stage_table(arch, 0, arch.num_layers, True, True)
    shapes = [pair for entry in table for pair in zip(entry.hf, entry.shapes, strict=True)]
    tensors = _loaded(shards, model, table, arch)
    with heap.freed_memory_goes_back():
        hf_folder.write(out, str(config.model.path), shapes, model.config.params_dtype, tensors)


def from_hugging_face(arch: Architecture, config: Config, shards: Path) -> dict[str, Written]:
    """Write the weights of `config.model.path` into the empty folder `shards`: what its files are, as commit wants it.

    `config`: of one rank. Tensors are brought to its `model.dtype`.
    """
    model = _hollow(arch, config)
    source = hf_folder.Folder(str(config.model.path))
    parameters = dict(model.named_parameters())
    places = {
        parameters[entry.name].untyped_storage().data_ptr(): (parameters[entry.name], entry)
        for entry in stage_table(arch, 0, arch.num_layers, True, True)
    }

    def fill(hollow: torch.Tensor) -> torch.Tensor:
        """The values of what may be a part of a parameter."""
        parameter, entry = places[hollow.untyped_storage().data_ptr()]
        tensors = [source.read(name) for name in entry.hf]
        whole = to_shard(entry, tensors, arch, 0, 1).to(parameter.dtype).contiguous()
        if whole.shape != parameter.shape:
            shapes = f"{tuple(whole.shape)}, config.json says {tuple(parameter.shape)}"
            raise ValueError(f"model.path {source.path}: {entry.hf[0]} gives {shapes}")
        return whole.as_strided(hollow.shape, hollow.stride(), hollow.storage_offset() - parameter.storage_offset())

    written: dict[str, Written] = {}
    group = dist.new_group(backend="gloo")
    strategy = InProcess(group, None, shards.parent, written, _Filling(fill))
    with heap.freed_memory_goes_back():
        dist_checkpointing.save({"model": {"0": model.sharded_state_dict()}}, str(shards), sharded_strategy=strategy)
    return written


def dtype_of(shards: Path) -> str:
    """The dtype of the weights in a checkpoint's folder `megatron`. ValueError where there are none."""
    if not (shards / ".metadata").exists():
        raise ValueError(f"{shards} holds no sharded weights")
    places = dist_checkpointing.load_tensors_metadata(str(shards))
    found = next((place for key, place in places.items() if key.startswith("embedding.")), None)
    if found is None:
        raise ValueError(f"{shards} holds no sharded weights")
    return str(found.dtype).removeprefix("torch.")


class _Filling(MCoreSavePlanner):
    """Gives the writer every tensor when it is its turn, and keeps none."""

    def __init__(self, fill: Any) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._fill = fill

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return self._fill(found) if isinstance(found, torch.Tensor) else found


def _hollow(arch: Architecture, config: Config) -> PackedGPTModel:
    (model,) = build(arch, config, torch.device("cpu"))
    return model


class _Pieces(torch_checkpoint.DefaultLoadPlanner):
    """Asks a checkpoint for pieces of its tensors, each with the memory that it is loaded into."""

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


class _Reader(torch_checkpoint.FileSystemReader):
    """Reads its index once."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index


def _loaded(
    shards: Path, model: PackedGPTModel, table: list[Entry], arch: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    places = model.sharded_state_dict()
    reader = _Reader(shards)
    _refuse_others(places, reader.read_metadata(), shards)
    for _, entries in itertools.groupby(table, _part):
        group = list(entries)
        values = {entry.name: torch.empty_like(places[entry.name].data) for entry in group}
        wanted: list[ShardedTensor] = []
        for entry in group:
            place = replace(places[entry.name], data=values[entry.name])
            wanted += _pieces(place)
        torch_checkpoint.load({}, storage_reader=reader, planner=_Pieces(wanted), no_dist=True)
        for entry in group:
            yield from to_hf(entry, values[entry.name][None], arch)


def _pieces(place: Any) -> list[ShardedTensor]:
    """What Megatron saves of one parameter, over the same memory."""
    return list(nested_values(place.build())) if isinstance(place, ShardedTensorFactory) else [place]


def _refuse_others(places: Mapping[str, Any], stored: Metadata, shards: Path) -> None:
    """ValueError where the checkpoint is that of another model."""
    weights = [place for place in places.values() if isinstance(place, ShardedTensor | ShardedTensorFactory)]
    wanted = {one.key: one for place in weights for one in _pieces(place)}
    there = {
        key: tuple(found.size)
        for key, found in stored.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not key.startswith("optimizer.")
    }
    for key in sorted(wanted.keys() | there.keys()):
        ours = tuple(wanted[key].global_shape) if key in wanted else None
        # Rows of the vocabulary are padded so that the ranks which saved had equally many.
        same = ours == there.get(key) or (ours and key in there and wanted[key].allow_shape_mismatch)
        if not same:
            has = f"of shape {there[key]}" if key in there else "missing"
            raise ValueError(
                f"{shards} is the checkpoint of another model: {key} is {has} there, and config.json wants "
                + ("no such weight" if ours is None else f"shape {ours}")
            )


def _part(entry: Entry) -> str:
    """What is loaded together: a layer, or of one with experts each of them by itself."""
    words = entry.name.split(".")
    return ".".join(words[:6] if entry.expert is not None else words[:3])
