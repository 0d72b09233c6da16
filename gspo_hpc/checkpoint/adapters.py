"""Adapters in a checkpoint: their matrices alone, under the names that their layers have at Hugging Face.

Those names and the shapes of whole matrices depend on no layout, so that what one layout has saved loads in any other.
The frozen base is not saved; what a checkpoint holds of it is its fingerprint. A command that exports reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from gspo_hpc.checkpoint import compat
from gspo_hpc.config.schema import Config
from gspo_hpc.models.adapter_table import AdapterPart, shapes
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import stage_table
from gspo_hpc.ops import hf_folder, peft_folder
from gspo_hpc.ops.weight_parts import Fingerprint, Part
from gspo_hpc.policy.adapters import lora
from gspo_hpc.policy.model import DTYPES

State = dict[str, Any]


def state(chunks: Sequence[Any]) -> State:
    """Return Megatron's sharded state of this rank's adapters, by the number of their chunk and their name."""
    return {
        str(number): {name: _sharded(name, module, part, which) for name, module, part, which in lora.matrices([chunk])}
        for number, chunk in enumerate(chunks)
    }


def _sharded(name: str, module: lora.Lora, part: AdapterPart, which: str) -> ShardedTensor:
    matrix, dim = module.matrix(part, which), module.cut_dim(which)
    found: ShardedTensor = (
        make_sharded_tensor_for_checkpoint(matrix, name)
        if dim is None
        else make_tp_sharded_tensor_for_checkpoint(matrix, name, tp_axis=dim)
    )
    return found


@torch.no_grad()
def load(chunks: Sequence[Any], loaded: State) -> None:
    """Give this rank's adapters the values that were loaded into the state of :func:`state`."""
    for number, chunk in enumerate(chunks):
        for name, module, part, which in lora.matrices([chunk]):
            module.matrix(part, which).copy_(loaded[str(number)][name])


def read(shards: Path, arch: Architecture, config: Config) -> tuple[dict[str, torch.Tensor], str]:
    """Return the whole matrices in `shards` (a checkpoint's folder `megatron`) by name, and their base's fingerprint.

    One rank reads, whatever layout wrote them. Raises ValueError where the shards are those of other adapters.
    """
    wanted, dtype = shapes(arch, config.adapter.rank, config.adapter.targets), DTYPES[config.model.dtype]
    places = {
        name: ShardedTensor.from_rank_offsets(name, torch.empty(shape, dtype=dtype)) for name, shape in wanted.items()
    }
    loaded = compat.load({"model": {"0": places}}, shards)
    return loaded["model"]["0"], str(loaded["base"])


def to_hugging_face(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the base with the adapters in `shards` merged into it as a Hugging Face folder, whole or not at all.

    It is read from `config.model.path` a tensor at a time; ValueError where it is not what adapters were trained on.
    """
    matrices, base = read(shards, arch, config)
    path, dtype = str(config.model.path), DTYPES[config.model.dtype]
    table = stage_table(arch, 0, arch.num_layers, True, True)
    every = [pair for entry in table for pair in zip(entry.hf, entry.shapes, strict=True)]
    source, present = hf_folder.Folder(path), Fingerprint()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in every:
            weight = source.read(name).to(dtype)
            present.add(Part(name, shape, weight))
            module = name.removesuffix(".weight")
            if (a := matrices.get(f"{module}.lora_A")) is not None:
                transposed = lora.product(a, matrices[f"{module}.lora_B"])
                weight = lora.added(weight, transposed, config.adapter.alpha / config.adapter.rank)
            yield name, weight
        refuse_other_base(base, present.text(present.values()), path)

    hf_folder.write(out, path, every, dtype, tensors())


def to_peft(shards: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Write the adapters in `shards` alone, as a folder in the format of peft, whole or not at all."""
    matrices, _ = read(shards, arch, config)
    peft_folder.write(out, config.adapter, str(config.model.path), matrices)


def refuse_other_base(stored: str | None, present: str | None, path: str) -> None:
    """Raise ValueError unless the base that adapters were trained on, by its fingerprint, is the one that is here."""
    if stored != present:
        raise ValueError(
            f"model.path {path} has other weights than those that this run's adapters were trained on (fingerprint "
            f"{stored} in the checkpoint, {present} here): give back the model that the run began with"
        )
