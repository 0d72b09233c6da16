"""Tell what versions of TRL do otherwise with the same arguments, as far as a run may be of one of these."""

from __future__ import annotations

import re

from gspo_hpc.importers.adapters import FOLDER
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.hf import precision
from gspo_hpc.importers.texts.trainers import UNSLOTH
from gspo_hpc.importers.versions.trl import span

# Arguments of sampling -> their defaults in transformers, whose place values of the model's own file take.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}


def tell(draft: Draft) -> None:
    """Tell all of it."""
    if UNSLOTH in draft.variables:  # whose trainer is another
        return
    low, high, patch = span(draft)
    if not draft.switch("use_vllm") and (low, patch) < (26, 2):
        _sampling(draft)
    if low <= 14 and (prompts := _prompts(draft, high)) > 1:
        draft.differs.append(
            f"TRL 0.14 computes log-probs without an attention mask: with {prompts} prompts on a device, the "
            "shorter ones see the pad tokens before them, in policy and reference; here no token sees padding"
        )
    if draft.switch("use_vllm") and low <= 24 and not _without_begin(draft):
        _begin(draft, low, high)
    temperature = draft.settings.get("rollout.temperature", (1.0,))[0]
    if low <= 15 and temperature != 1:
        draft.differs.append(
            f"TRL up to 0.15 computes log-probs at temperature 1, although it samples at {temperature:g}; here logits "
            "are divided by rollout.temperature, as since 0.16, and divergence and gradient are of that distribution"
        )
    dtype = draft.text("dtype") or draft.text("torch_dtype")
    if low <= 25 and dtype not in (None, "auto", "float32") and draft.variables.get("entry") == "trl":
        draft.differs.append(
            f"trl grpo of TRL up to 0.25 hands dtype to no model, and loads float32; {dtype} since 0.26"
        )
    if high >= 26 and "adapter.type" in draft.settings and precision.is_quantized(draft):
        draft.differs.append(
            "TRL since 0.26 turns adapters on quantized weights into bfloat16, and Adam trains them so; here they are "
            "float32"
        )
    if FOLDER in (draft.text("peft_config") or "") and draft.settings.get("algorithm.kl_beta", (0.0,))[0]:
        sides = ["the model without adapters (TRL up to 0.26)"] * (low <= 26)
        sides += ["a copy of the adapters (since 0.27)"] * (high >= 27)
        draft.differs.append(
            f"the reference of the divergence is {', '.join(sides)} there where a model begins with those of a folder; "
            "with adapter.path it is the model with these here"
        )


def _prompts(draft: Draft, high: int) -> int:
    """Return how many prompts a device has at once in TRL 0.14, where per_device_train_batch_size counts prompts."""
    name = "per_device_train_batch_size"
    size = (draft.whole(name, 1) or 1) if draft.given(name) else 1
    if high > 14:  # what is given is read as completions, as since 0.15
        return size
    return size // (draft.whole("num_generations", 8) or 8)  # prompts have become completions


def _without_begin(draft: Draft) -> bool:
    """Tell whether a model is one of Qwen's own, whose tokenizers add no begin token."""
    path = str(draft.settings.get("model.path", ("",))[0])
    return re.match(r"(?i)qwen", path.rstrip("/").rpartition("/")[2]) is not None


def _begin(draft: Draft, low: int, high: int) -> None:
    """Tell that vLLM was handed text, before which it puts a begin token of its own."""
    scored = ["of one up to 0.23"] * (low <= 23) + ["of two in 0.24"] * (high >= 24)
    line = (
        "TRL up to 0.24 hands vLLM rendered chat templates as text, and a tokenizer that adds a begin token (Llama's, "
        "Gemma's, DeepSeek-R1-Distill's) adds it to the one of the template: completions are sampled behind two there, "
        f"and log-probs are {', '.join(scored)}; here both have one"
    )
    if low <= 23:
        line += ". A prompt that is plain text has one for vLLM and none for log-probs up to 0.23; here both have one"
    draft.differs.append(line)


def truncated(draft: Draft) -> None:
    """Put what becomes of prompts that are longer than max_prompt_length, which is given."""
    low, high, _ = span(draft)
    if low >= 26:
        draft.differs.append(
            "max_prompt_length: TRL 0.26 and 0.27 cut no prompt by it; here a longer one ends the run, unless "
            "data.overlong says otherwise"
        )
        return
    text = "as TRL up to 0.25 truncates to max_prompt_length, up to 0.18 for the loss alone, where vLLM generates"
    text += "; 0.26 and 0.27 cut no prompt" if high >= 26 else ""
    draft.put("data.overlong", "truncate_left", comment=text, of=("max_prompt_length",))


def _sampling(draft: Draft) -> None:
    """Tell that the model's own values of sampling may count."""
    plain = [name for name, value in _SAMPLING.items()
             if name != "top_k" and draft.number(name, float(value)) == value]  # fmt: skip
    plain += [name for name in ("top_k",) if draft.whole(name, 0, least=-1) == _SAMPLING[name]]
    plain += ["min_p"] if not draft.given("min_p") else []
    if plain:
        draft.differs.append(
            f"TRL up to 0.26.1 without vLLM, with transformers 4.50 to 4.57: {', '.join(plain)}, being transformers' "
            "defaults, give way to those of the model's generation_config.json, if that was saved by 4.50 or later "
            "(Qwen3, say); log-probs are not of these. Here the config decides"
        )
