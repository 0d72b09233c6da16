"""The file adapter_config.json of a folder in the format of `peft`: what a run writes, and what it can begin with.

No torch, so that a login node can refuse a folder whose adapters compute something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"  # of earlier versions of peft

# What peft can add to plain LoRA, beside what it is where nothing is added.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),  # matrices of all experts in one, with gate and up as one layer
}


def content(adapter: Adapter, base: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return what peft reads of adapters on layers with these names that were trained on the model `base`."""
    alpha = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def rank_and_alpha(folder: Path) -> tuple[int, float]:
    """Return the rank of the adapters in a folder of peft, and the alpha by which over their rank they are scaled.

    Raises ValueError of one line where the folder does not say.
    """
    try:
        return _scaled(json.loads((folder / CONFIG).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read: {type(error).__name__}: {error}") from None


def _scaled(found: dict[str, Any]) -> tuple[int, float]:
    rank, alpha = int(found["r"]), float(found["lora_alpha"])
    return rank, alpha * math.sqrt(rank) if found.get("use_rslora") else alpha  # then the scale is alpha / sqrt(rank)


def missing(path: Path) -> str | None:
    """Return in a line which file a folder of peft lacks; None if it has both."""
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            pickled = name == WEIGHTS and (path / _PICKLED).is_file()
            why = f" with safetensors ({_PICKLED} is a pickle, which is not read)" if pickled else ""
            return f"adapter.path {path} has no {name}: give a folder in the format of peft{why}"
    return None


def obstacle(adapter: Adapter) -> str | None:
    """Return in a line why a run cannot begin with the adapters in `adapter.path`; None if it can, as far as known."""
    if adapter.path is None:
        return None
    path = Path(adapter.path)
    if (lacks := missing(path)) is not None:
        return lacks
    try:
        found = json.loads((path / CONFIG).read_text("utf-8"))
        kind, (rank, alpha) = found["peft_type"], _scaled(found)
    except (ValueError, KeyError, TypeError) as error:
        return f"{path / CONFIG} cannot be read: {type(error).__name__}: {error}"
    if kind != "LORA":
        return f"adapter.path {path} holds adapters of type {kind}: only LORA can be trained"
    for name, plain in _PLAIN.items():
        if found.get(name) not in plain:
            return f"adapter.path {path} has {name} {found[name]}, which this version does not compute"
    if rank != adapter.rank:
        return f"adapter.rank is {adapter.rank}, but adapter.path {path} has rank {rank}: give adapter.rank={rank}"
    if not math.isclose(alpha, adapter.alpha, rel_tol=1e-6):
        return (
            f"adapter.alpha is {adapter.alpha:g}, but adapter.path {path} scales by {alpha:g} / rank: give "
            f"adapter.alpha={alpha:g}"
        )
    return None
