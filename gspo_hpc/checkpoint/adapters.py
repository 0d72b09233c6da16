"""Adapters in a checkpoint: their matrices alone, under the names that their layers have at Hugging Face.

Those names and the shapes of whole matrices depend on no layout, so that what one layout has saved loads in any other.
The frozen base is not saved; what a checkpoint holds of it is its fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from gspo_hpc.models.adapter_table import AdapterPart
from gspo_hpc.policy.adapters import lora

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


def refuse_other_base(stored: str | None, present: str | None, path: str) -> None:
    """Raise ValueError unless the base that adapters were trained on, by its fingerprint, is the one that is here."""
    if stored != present:
        raise ValueError(
            f"model.path {path} has other weights than those that this run's adapters were trained on (fingerprint "
            f"{stored} in the checkpoint, {present} here): give back the model that the run began with"
        )
