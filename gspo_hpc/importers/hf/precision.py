"""Put the precision in which Hugging Face's trainers compute, and what takes the place of ZeRO and FSDP."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import yaml_value
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.texts.sources import READ
from gspo_hpc.importers.texts.trainers import UNSLOTH
from gspo_hpc.importers.texts.uses.models import QUANTIZED

_HALVES = ("bfloat16", "float16")
_UNLESS = ", unless its script loads them in 16 bits, or its launcher starts DeepSpeed, which casts them"


def put(draft: Draft) -> None:
    """Put the precision: with bf16, float32 weights compute in bfloat16, as here; without, in that of the weights."""
    kwargs = draft.values.get("model_init_kwargs")
    kwargs = yaml_value(kwargs) if isinstance(kwargs, str) and not is_unset(kwargs) else kwargs
    loaded = kwargs if isinstance(kwargs, Mapping) else {}
    if rest := [str(name) for name, value in loaded.items() if value and name not in ("dtype", "torch_dtype")]:
        quantized = any(name in rest for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))
        if quantized:
            draft.variables[QUANTIZED] = "model_init_kwargs"
        text = f"; {QUANTIZED}" if quantized else ""
        draft.drop("model_init_kwargs", f"{', '.join(rest)} of it: no counterpart here{text}")
    name = "dtype" if draft.given("dtype") else "torch_dtype"
    dtype = draft.choice(name, ("auto", *_HALVES, "float32"), "auto")
    if not draft.given(name) and (one := loaded.get("dtype", loaded.get("torch_dtype"))):
        dtype = str(one).removeprefix("torch.")
        draft.credit("model.dtype", "model_init_kwargs")
    half = draft.switch("fp16")
    if half or draft.switch("bf16", True):
        draft.put("model.dtype", "float16" if half else "bfloat16", of=("bf16", "fp16", name))
        masters = "optimizer.distributed" in draft.settings  # of ZeRO and FSDP
    else:
        draft.put("model.dtype", dtype if dtype in _HALVES else "float32", of=("bf16", "fp16", name))
        masters = False
    given = draft.given(name) or dtype != "auto"
    whole = not given and not _otherwise_loaded(draft)
    if (half or draft.switch("bf16", True)) and not masters and (dtype == "float32" or whole):
        unless = "" if given or _is_seen(draft) else _UNLESS
        draft.differs.append(
            f"weights are in float32 there{unless}, and products of matrices alone in 16 bits (autocast): norms, "
            "embeddings and what layers add to have 16 bits here (model.dtype)"
        )
    frozen = "adapter.type" in draft.settings or draft.values.get("peft_config") or is_quantized(draft)
    if dtype in _HALVES and not masters and not frozen:
        draft.assumed.append(
            f"weights loaded as {dtype}: without ZeRO or FSDP they are trained in it there, and here the optimizer "
            "keeps them in float32"
        )


def is_quantized(draft: Draft) -> bool:
    """Tell whether a run loads its weights quantized."""
    return QUANTIZED in draft.variables or draft.switch("load_in_4bit") or draft.switch("load_in_8bit")


def _otherwise_loaded(draft: Draft) -> bool:
    """Tell whether weights are, or may be, quantized, or loaded by Unsloth, which never takes float32 by itself."""
    listed = (draft.values.get(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))
    named = any(is_unset(value) or str(value).lower() not in ("none", "null", "false", "") for value in listed)
    return UNSLOTH in draft.variables or QUANTIZED in draft.variables or named


def _is_seen(draft: Draft) -> bool:
    """Tell whether what loads the weights is seen: a Python file, or TRL's own script."""
    return READ in draft.variables or draft.variables.get("entry") == "trl"


def sharding(draft: Draft) -> None:
    """Put what takes the place of ZeRO and FSDP."""
    launched = draft.variables.get("distributed_type") in ("DEEPSPEED", "FSDP")
    if draft.given("fsdp") or draft.given("deepspeed") or launched:
        text = "in place of ZeRO or FSDP; ZeRO-3 and FSDP shard the weights, too"
        draft.put("optimizer.distributed", True, comment=text, of=("distributed_type",))
        draft.drop("deepspeed", "optimizer.distributed cuts the optimizer; parallel.* cuts the model")
        draft.drop("fsdp", "optimizer.distributed cuts the optimizer; parallel.* cuts the model")


def gradients(draft: Draft) -> None:
    """Tell in which precision gradients are summed, where it is another one."""
    if "optimizer.distributed" in draft.settings and draft.settings.get("model.dtype", ("",))[0] != "float32":
        draft.differs.append(
            "ZeRO and FSDP reduce and add up gradients in the model's 16 bits, unless their own configs say otherwise; "
            "here they are summed in float32 (optimizer.grad_reduce_in_fp32)"
        )
