"""Adapters in a checkpoint: their matrices alone, under the names that their layers have at Hugging Face.

Those names and the shapes of whole matrices depend on no layout, so that what one layout has saved loads in any other.
The frozen base is not saved; what a checkpoint holds of it is its fingerprint. A command that exports reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gspo_hpc.checkpoint import compat, index
from gspo_hpc.config.schema import Adapter, Config
from gspo_hpc.models.adapter_table import AdapterPart, is_of_embedding, shapes, targets_of
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import stage_table
from gspo_hpc.ops import hf_folder, peft_folder
from gspo_hpc.ops.weight_parts import Fingerprint, Part
from gspo_hpc.policy.adapters import lora, matrices
from gspo_hpc.policy.model import DTYPES
from gspo_hpc.system.files import Entry

State = dict[str, Any]


def state(chunks: Sequence[Any]) -> State:
    """Return Megatron's sharded state of this rank's adapters, by the number of their chunk and their name."""
    return {
        str(number): {
            name: _sharded(name, module, part, which) for name, module, part, which in matrices.of_chunks([chunk])
        }
        for number, chunk in enumerate(chunks)
    }


def _sharded(name: str, module: lora.Lora, part: AdapterPart, which: str) -> ShardedTensor:
    matrix, dim = module.matrix(part, which), module.cut_dim(which)
    if module.expert is not None:
        size, rank = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        copy = parallel_state.get_expert_data_parallel_rank()
        places = [] if dim is None else [(dim, rank, size)]
        of_expert: ShardedTensor = ShardedTensor.from_rank_offsets(
            name, matrix, *places, replica_id=(0, rank if dim is None else 0, copy)
        )
        return of_expert
    found: ShardedTensor = (
        make_sharded_tensor_for_checkpoint(matrix, name)
        if dim is None
        else make_tp_sharded_tensor_for_checkpoint(
            matrix,
            name,
            tp_axis=dim,
            allow_shape_mismatch=is_of_embedding(name),  # ranks fill it up to equal parts
        )
    )
    return found


@torch.no_grad()
def load(chunks: Sequence[Any], loaded: State) -> None:
    """Give this rank's adapters the values that were loaded into the state of :func:`state`."""
    for number, chunk in enumerate(chunks):
        for name, module, part, which in matrices.of_chunks([chunk]):
            module.matrix(part, which).copy_(loaded[str(number)][name])


def read(shards: Path, arch: Architecture, config: Config) -> tuple[dict[str, torch.Tensor], str]:
    """Return the whole matrices in `shards` (a checkpoint's folder `megatron`) by name, and their base's fingerprint.

    One rank reads, whatever layout wrote them. Raises ValueError where the shards are those of other adapters.
    """
    wanted, dtype = shapes(arch, config.adapter.rank, config.adapter.targets), DTYPES[config.model.dtype]
    places = {
        name: ShardedTensor.from_rank_offsets(
            name, torch.empty(shape, dtype=dtype), allow_shape_mismatch=is_of_embedding(name)
        )
        for name, shape in wanted.items()
    }
    loaded = compat.load({"model": {"0": places}}, shards)
    return loaded["model"]["0"], str(loaded["base"])


def settings(shards: Path, alpha: float | None) -> Adapter | None:
    """Return the section `adapter` of the run that saved `shards`; None where they hold a whole model.

    `alpha` is needed only of a checkpoint of an earlier version, which does not have it.
    """
    found = {
        key: place.size
        for key, place in index.read(shards).state_dict_metadata.items()
        if isinstance(place, TensorStorageMetadata) and key.endswith(".lora_A") and key.startswith("model.")
    }
    if not found:
        return None
    alpha = compat.common(shards).get("alpha", alpha)
    if alpha is None:
        raise ValueError(f"{shards} does not say how its adapters are scaled: give --alpha, the run's adapter.alpha")
    targets = targets_of(key.removesuffix(".lora_A") for key in found)
    return Adapter(type="lora", rank=next(iter(found.values()))[0], alpha=float(alpha), targets=targets)


def to_hugging_face(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the base with the adapters in `shards` merged into it as a Hugging Face folder, whole or not at all.

    It is read from `config.model.path` a tensor at a time; ValueError where it is not what adapters were trained on.
    """
    found, base = read(shards, arch, config)
    path, dtype = str(config.model.path), DTYPES[config.model.dtype]
    present = Fingerprint()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in _base(arch, config, present):
            module = name.removesuffix(".weight")
            if (a := found.get(f"{module}.lora_A")) is not None:
                b, scale = found[f"{module}.lora_B"], config.adapter.alpha / config.adapter.rank
                if is_of_embedding(f"{module}.lora_A"):
                    weight = lora.added_to_rows(weight, a, b, scale)
                else:
                    weight = lora.added(weight, lora.product(a, b), scale)
            yield name, weight
        refuse_other_base(base, present.text(present.values()), path)

    hf_folder.write(out, path, _shapes(arch), dtype, tensors())


def from_peft(arch: Architecture, config: Config, shards: Path) -> dict[str, Entry]:
    """Write the adapters in `config.adapter.path` into the empty folder `shards`; return size and hash of each file.

    `config` describes a run of one rank, whose `model.path` is the base that they belong to.
    """
    dtype, present = DTYPES[config.model.dtype], Fingerprint()
    wanted = shapes(arch, config.adapter.rank, config.adapter.targets)
    found = peft_folder.read(config.adapter, wanted, str(config.model.path))
    for _ in _base(arch, config, present):
        pass
    places = {name: ShardedTensor.from_rank_offsets(name, matrix.to(dtype)) for name, matrix in found.items()}
    state: State = {"model": {"0": places}, "base": present.text(present.values()), "alpha": config.adapter.alpha}
    written: dict[str, Entry] = {}
    compat.prepare(state, shards, dist.new_group(backend="gloo"), written)()
    return written


def _shapes(arch: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    table = stage_table(arch, 0, arch.num_layers, True, True)
    return [pair for entry in table for pair in zip(entry.hf, entry.shapes, strict=True)]


def _base(arch: Architecture, config: Config, present: Fingerprint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base's own weights in the trained dtype, each of which is added to `present` before."""
    source, dtype = hf_folder.Folder(str(config.model.path)), DTYPES[config.model.dtype]
    for name, shape in _shapes(arch):
        weight = source.read(name).to(dtype)
        present.add(Part(name, shape, weight))
        yield name, weight


def to_peft(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the adapters in `shards` alone, as a folder in the format of peft, whole or not at all.

    It names the base in `config.model.path`; ValueError where that is not what the adapters were trained on.
    """
    found, base = read(shards, arch, config)
    present = Fingerprint()
    for _ in _base(arch, config, present):
        pass
    refuse_other_base(base, present.text(present.values()), str(config.model.path))
    peft_folder.write(out, config.adapter, str(config.model.path), found)


def refuse_other_base(stored: str | None, present: str | None, path: str) -> None:
    """Raise ValueError unless the base that adapters were trained on, by its fingerprint, is the one that is here."""
    if stored != present:
        raise ValueError(
            f"model.path {path} has other weights than those that this run's adapters were trained on (fingerprint "
            f"{stored} in the checkpoint, {present} here): give back the model that the run began with"
        )


def refuse_other_start(stored: str | None, present: str | None, path: str) -> None:
    """Raise ValueError unless the adapters that a run began with, by their fingerprint, are those that are here."""
    if stored != present:
        raise ValueError(
            f"adapter.path {path} has other adapters than those that this run began with (fingerprint {stored} in the "
            f"checkpoint, {present} here): give back the folder that the run began with"
        )
