"""Folders of adapters in the format of `peft`, written and read without it: one file of settings, one of matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from gspo_hpc.config.schema import Adapter
from gspo_hpc.models import peft_config
from gspo_hpc.models.adapter_table import chosen, is_of_embedding, targets_of
from gspo_hpc.ops import hf_folder
from gspo_hpc.ops.weight_parts import Fingerprint, Part

_BEFORE, _AFTER = "base_model.model.", ".weight"  # around the names of matrices
_OF_EMBEDDING = "lora_embedding_"  # what peft has in their names in place of lora_, and nothing behind them

# Copies of the model's own weights in such a folder, and their names in the model.
_COPIED = {
    "model.embed_tokens.base_layer.weight": "model.embed_tokens.weight",
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
}


def write(out: Path, adapter: Adapter, base: str, matrices: Mapping[str, torch.Tensor]) -> None:
    """Write `matrices`, by the names of layers with lora_A or lora_B, into the folder `out`, whole or not at all."""
    with hf_folder.whole(out) as staging:
        tensors = {_theirs(name): matrix for name, matrix in matrices.items()}
        hf_folder.write_tensors(staging / peft_config.WEIGHTS, tensors)
        modules = list(dict.fromkeys(name.split(".")[-2] for name in matrices))
        content = json.dumps(peft_config.content(adapter, base, modules), indent=2)
        (staging / peft_config.CONFIG).write_text(f"{content}\n", "utf-8")


def _theirs(name: str) -> str:
    """Return a matrix's name in a folder of peft."""
    if is_of_embedding(name):
        return _BEFORE + name.replace(".lora_", f".{_OF_EMBEDDING}")
    return f"{_BEFORE}{name}{_AFTER}"


def _ours(name: str) -> str:
    return name.removeprefix(_BEFORE).removesuffix(_AFTER).replace(f".{_OF_EMBEDDING}", ".lora_")


def settings(folder: Path) -> Adapter:
    """Return the section `adapter` of a run that begins with the adapters in a folder of peft; ValueError for none."""
    if (lacks := peft_config.missing(folder)) is not None:
        raise ValueError(lacks)
    rank, alpha = peft_config.rank_and_alpha(folder)
    layers = [_ours(name).rpartition(".")[0] for name in hf_folder.tensors_of(folder / peft_config.WEIGHTS)]
    found = Adapter(type="lora", path=str(folder), rank=rank, alpha=alpha, targets=targets_of(layers))
    if (wrong := peft_config.obstacle(found)) is not None:
        raise ValueError(wrong)
    return found


def dtype_of(folder: Path) -> str:
    """Return the dtype of the matrices in a folder of peft, as `model.dtype` names it; float32 where they have others.

    Of several it is the first of float32, float16 and bfloat16.
    """
    stored = hf_folder.tensors_of(folder / peft_config.WEIGHTS).values()
    found = {str(one.dtype).removeprefix("torch.") for one in stored}
    return next((name for name in ("float32", "float16", "bfloat16") if name in found), "float32")


def read(adapter: Adapter, shapes: Mapping[str, tuple[int, int]], base: str | Path) -> dict[str, torch.Tensor]:
    """Return the matrices of the folder `adapter.path`, which has to have those of `shapes` and no others.

    Peft may save the model's own embedding and head beside them; these have to be those of `base`, a Hugging Face
    folder. Raises ValueError of one line for any other folder.
    """
    if (wrong := peft_config.obstacle(adapter)) is not None:
        raise ValueError(wrong)
    path = Path(str(adapter.path)) / peft_config.WEIGHTS
    stored = hf_folder.tensors_of(path)
    for name, there in _COPIED.items():
        copy = stored.pop(f"{_BEFORE}{name}", None)
        if copy is not None and not _is_own(copy, there, hf_folder.Folder(base)):
            raise ValueError(
                f"adapter.path {adapter.path} has a {there} of its own, other than that of model.path {base}: merge it "
                "into the model and give that as model.path"
            )
    found = {_ours(name): tensor for name, tensor in stored.items()}
    if others := sorted(found.keys() ^ shapes.keys()):
        parts = [name.rpartition(".") for name in found]
        if strange := sorted(last for _, _, last in parts if last not in ("lora_A", "lora_B")):
            raise ValueError(f"{path} has {strange[0]}, which is no matrix of plain LoRA: only that can be trained")
        which = ",".join(targets_of(layer for layer, _, _ in parts))
        what = f"the run's are others: give adapter.targets=[{which}]"
        if which == ",".join(chosen(adapter.targets)):
            what = "the model's are on others of its layers"
        raise ValueError(
            f"adapter.path {adapter.path} has adapters on {which or 'other layers'}, and {what} "
            f"({len(others)} matrices differ, the first is {others[0]})"
        )
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {tuple(found[name].shape)}, but the model needs {shape}")
    return found


def _is_own(copy: torch.Tensor, name: str, base: hf_folder.Folder) -> bool:
    """Return whether a copy is a weight of the base, whose head may be its embedding."""
    if name not in base.names():
        name = "model.embed_tokens.weight"
    own = base.read(name).to(copy.dtype)
    return torch.equal(copy, own)


def fingerprint(matrices: Mapping[str, torch.Tensor]) -> str:
    """Return a short text that says which adapters these are, bit for bit."""
    found = Fingerprint()
    for name, matrix in matrices.items():
        found.add(Part(name, tuple(matrix.shape), matrix))
    return found.text(found.values())
