"""The file adapter_config.json of a folder in the format of `peft`: what a run writes, and what it can begin with.

No torch, so that a login node can refuse a folder whose adapters compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Adapter
from gspo_hpc.system.text import MALFORMED, parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"  # of earlier versions of peft

# Settings that change nothing of what plain LoRA computes, whatever they are.
_INERT = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora"),
        *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core", "qalora_group_size"),
        *("eva_config", "runtime_config"),  # of the first values, and of how they are loaded
    }
)
# Values of others with which nothing is added to plain LoRA, beside those that are empty. What an initialization takes
# out of the base (pissa, olora, loftq and others) is not in the folder: peft takes it out again as it loads it.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


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
        return _scaled(parse_json((folder / CONFIG).read_text("utf-8")))
    except (OSError, *MALFORMED) as error:
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
        found = parse_json((path / CONFIG).read_text("utf-8"))
        kind, (rank, alpha) = found["peft_type"], _scaled(found)
    except MALFORMED as error:
        return f"{path / CONFIG} cannot be read: {type(error).__name__}: {error}"
    if kind != "LORA":
        return f"adapter.path {path} holds adapters of type {kind}: only LORA can be trained"
    for name in found.keys() - _INERT:
        if found[name] not in (*_EMPTY, *_PLAIN.get(name, ())):
            return f"adapter.path {path} has {name} {found[name]}, which this version does not compute"
    if rank < 1:
        return f"adapter.path {path} has rank {rank}: there are no matrices in it"
    if rank != adapter.rank:
        return f"adapter.rank is {adapter.rank}, but adapter.path {path} has rank {rank}: give adapter.rank={rank}"
    if not math.isclose(alpha, adapter.alpha, rel_tol=1e-6):
        return (
            f"adapter.alpha is {adapter.alpha:g}, but adapter.path {path} scales by {alpha:g} / rank: give "
            f"adapter.alpha={alpha:g}"
        )
    return None
