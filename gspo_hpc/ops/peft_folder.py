"""Folders of adapters in the format of `peft`, written and read without it: one file of settings, one of matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from gspo_hpc.config.schema import Adapter
from gspo_hpc.models import peft_config
from gspo_hpc.models.adapter_table import targets_of
from gspo_hpc.ops import hf_folder
from gspo_hpc.ops.weight_parts import Fingerprint, Part

_BEFORE, _AFTER = "base_model.model.", ".weight"  # around the names of matrices


def write(out: Path, adapter: Adapter, base: str, matrices: Mapping[str, torch.Tensor]) -> None:
    """Write `matrices`, by the names of layers with lora_A or lora_B, into the folder `out`, whole or not at all."""
    with hf_folder.whole(out) as staging:
        tensors = {f"{_BEFORE}{name}{_AFTER}": matrix for name, matrix in matrices.items()}
        hf_folder.write_tensors(staging / peft_config.WEIGHTS, tensors)
        modules = list(dict.fromkeys(name.split(".")[-2] for name in matrices))
        content = json.dumps(peft_config.content(adapter, base, modules), indent=2)
        (staging / peft_config.CONFIG).write_text(f"{content}\n", "utf-8")


def settings(folder: Path) -> Adapter:
    """Return the section `adapter` of a run that begins with the adapters in a folder of peft; ValueError for none."""
    if (lacks := peft_config.missing(folder)) is not None:
        raise ValueError(lacks)
    rank, alpha = peft_config.rank_and_alpha(folder)
    layers = [name.rsplit(".", 2)[0] for name in hf_folder.tensors_of(folder / peft_config.WEIGHTS)]
    found = Adapter(type="lora", path=str(folder), rank=rank, alpha=alpha, targets=targets_of(layers))
    if (wrong := peft_config.obstacle(found)) is not None:
        raise ValueError(wrong)
    return found


def read(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return the matrices of the folder `adapter.path`, which has to have those of `shapes` and no others.

    Raises ValueError of one line for any other folder.
    """
    if (wrong := peft_config.obstacle(adapter)) is not None:
        raise ValueError(wrong)
    path = Path(str(adapter.path)) / peft_config.WEIGHTS
    stored = hf_folder.tensors_of(path)
    found = {name.removeprefix(_BEFORE).removesuffix(_AFTER): tensor for name, tensor in stored.items()}
    if others := sorted(found.keys() ^ shapes.keys()):
        which = sorted({name.split(".")[-2] for name in found if "." in name})
        raise ValueError(
            f"adapter.path {adapter.path} has adapters on {', '.join(which)}, and the run's are others "
            f"({len(others)} matrices differ, the first is {others[0]}): give adapter.targets=[{','.join(which)}]"
        )
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {tuple(found[name].shape)}, but the model needs {shape}")
    return found


def fingerprint(matrices: Mapping[str, torch.Tensor]) -> str:
    """Return a short text that says which adapters these are, bit for bit."""
    found = Fingerprint()
    for name, matrix in matrices.items():
        found.add(Part(name, tuple(matrix.shape), matrix))
    return found.text(found.values())
