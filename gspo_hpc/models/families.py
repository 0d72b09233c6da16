"""Sizes of models that are planned and not trained: latent and linear attention, other mixtures, models that see.

Parameters are counted as transformers builds these models. Layers that only predict further tokens (MTP) are left out,
as they are in training, and so are the correction biases of routers, which have no gradient. What a config.json of
another family says is counted as a plain decoder with grouped-query attention, and what families have without saying
so is in decoders.py; `about` names what is not exact then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_hpc.models import decoders
from gspo_hpc.models.parts import Experts, Mixer

Raw = Mapping[str, Any]

# Families whose parameters are exact; tests hold them against published numbers, and against transformers' models.
EXACT = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
_QKV_BIAS = ("Qwen2VL", "Qwen2_5_VL", "Qwen2Moe", "Qwen2For")
_QK_NORM = ("Qwen3",)
_GATED = ("Afmoe", "Qwen3Next", "Qwen3_5")  # attention whose output goes through a gate of the queries' size
_OUTPUT_BIAS = ("GptOss", "Llama")  # where attention_bias is that of the output's matrix, too
_VISION_QWEN2_5, _VISION_QWEN3 = ("qwen2_5_vl",), ("qwen3_vl", "qwen3_5")
_DENSE_BESIDE = ("HunYuanMoE", "Llama4", "LongcatFlash")  # a mixture with an MLP of the family's inner size beside it
_PATCH_CHANNELS = 3


def text_part(raw: Raw) -> Raw:
    """Return the part of a config.json that describes the decoder of text."""
    text = raw.get("text_config")
    return text if isinstance(text, Mapping) else raw


def extras(raw: Raw, *, known: bool) -> dict[str, Any]:
    """Return what distinguishes a model from a plain decoder, as fields of Architecture.

    `known`: the family is one that this package trains, with settings that it does not. Raises KeyError for a
    size that is missing.
    """
    family, text = str((raw.get("architectures") or ["an unnamed architecture"])[0]), text_part(raw)
    layers = int(text["num_hidden_layers"])
    kinds = _layer_kinds(text, layers)
    named = decoders.kind(raw, text)
    mixers = {kind: _mixer(text, family, named, kind) for kind in set(kinds)}
    vision, seen = _vision(raw)
    return {
        "tie_word_embeddings": decoders.tied(raw, text, named),
        "ffn_hidden_size": decoders.inner_size(text, named),
        "mlp_matrices": 2 if named in decoders.UNGATED else 3,
        "experts": _experts(text, family, layers),
        "mixers": tuple(mixers[kind] for kind in kinds),
        "first_parameters": vision + decoders.first_parameters(text, named),
        "about": "; ".join(
            ([] if known or family in EXACT else [decoders.doubt(family, raw, text, named)])
            + _uncounted(_slides(text, family, kinds), seen)
        ),
    }


def _uncounted(slides: bool, all_parts: bool) -> list[str]:
    found = []
    if not all_parts:
        found.append("the parts that see or hear are not counted")
    if slides:
        found.append("layers with a sliding window are counted as if they saw everything, in the cache and in time")
    return found


def _slides(text: Raw, family: str, kinds: list[str]) -> bool:
    """Return whether some layers see only the last tokens."""
    if "sliding_attention" in kinds or text.get("use_sliding_window"):
        return True
    return bool(text.get("sliding_window")) and family.startswith(("Mistral", "Mixtral"))


def _layer_kinds(text: Raw, layers: int) -> list[str]:
    """Return full_attention, sliding_attention or linear_attention for each layer."""
    given = text.get("layer_types")
    if isinstance(given, list) and len(given) == layers:
        return [str(kind) for kind in given]
    every = text.get("full_attention_interval")
    if "linear_num_value_heads" not in text or not isinstance(every, int) or every < 1:
        return ["full_attention"] * layers
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _mixer(text: Raw, family: str, named: str, kind: str) -> Mixer:
    if kind == "linear_attention" and "linear_num_value_heads" in text:
        return _delta(text)
    if text.get("kv_lora_rank"):
        return _latent(text)
    if kind == "conv":
        return _convolution(text)
    return _grouped(text, family, named)


def _grouped(text: Raw, family: str, named: str) -> Mixer:
    """Count grouped-query attention, perhaps with biases, norms, a gate, or learned sinks."""
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    groups, size = int(text.get("num_key_value_heads") or heads), int(text.get("head_dim") or hidden // heads)
    gated = family.startswith(_GATED) or bool(text.get("attn_output_gate"))
    queries = heads * size
    first = queries * (1 + gated) + 2 * groups * size  # what a token becomes
    bias = bool(text.get("attention_bias")) or family.startswith(_QKV_BIAS)
    norms = 2 * size * (family.startswith(_QK_NORM) or bool(text.get("use_qk_norm")))
    sinks = heads * family.startswith("GptOss")
    crossed = 4 * hidden * hidden * (named in decoders.CROSSED)
    return Mixer(
        split=first * (hidden + bias) + queries * hidden + sinks + crossed,
        whole=norms + hidden * (bias and family.startswith(_OUTPUT_BIAS)),
        products=(first + queries) * hidden + crossed,
        scores=2 * queries,
        cache=2 * groups * size,
        cache_heads=groups,
        kept=first + queries * (1 + gated),
    )


def _latent(text: Raw) -> Mixer:
    """Count multi-head latent attention (DeepSeek-V2), perhaps with the indexer of sparse attention (V3.2)."""
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    low_q, low_kv = int(text.get("q_lora_rank") or 0), int(text["kv_lora_rank"])
    plain, rotary, value = (int(text[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    down = hidden * (low_q + low_kv + rotary)
    up = (low_q or hidden) * heads * (plain + rotary) + low_kv * heads * (plain + value)
    indexed = int(text.get("index_n_heads") or 0), int(text.get("index_head_dim") or 0)
    indexer = low_q * indexed[0] * indexed[1] + hidden * sum(indexed)
    biases = (low_q + low_kv + rotary + hidden) * bool(text.get("attention_bias"))
    return Mixer(
        split=up + heads * value * hidden,
        whole=down + low_q + low_kv + biases + indexer + 2 * indexed[1],
        products=down + up + heads * value * hidden + indexer,
        scores=heads * (plain + rotary + value),
        cache=low_kv + rotary + indexed[1],
        cache_heads=1,
        kept=heads * (2 * (plain + rotary) + 2 * value) + low_q + low_kv + rotary,
    )


def _delta(text: Raw) -> Mixer:
    """Count a gated delta net (Qwen3-Next): linear attention with a state that does not grow."""
    hidden, kernel = int(text["hidden_size"]), int(text["linear_conv_kernel_dim"])
    values, size = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    mixed = 2 * keys + values * size  # queries, keys and values, through a convolution
    first = mixed + values * size + 2 * values  # with the gate, and two numbers a head
    matrices = hidden * (first + values * size)
    return Mixer(
        split=matrices + kernel * mixed + 2 * values,
        whole=size,
        products=matrices + kernel * mixed,
        scores=0,
        cache=0,
        cache_heads=1,
        kept=first + mixed + 2 * values * size,
    )


def _convolution(text: Raw) -> Mixer:
    """Count a gated short convolution (LFM2): three products of a token, a filter of each channel, and an output."""
    hidden = int(text["hidden_size"])
    split = hidden * (4 * hidden + int(text.get("conv_L_cache") or 3))
    return Mixer(split=split, whole=0, products=split, scores=0, cache=0, cache_heads=1, kept=6 * hidden)


def _experts(text: Raw, family: str, layers: int) -> Experts | None:
    """Return the mixture, under the names of DeepSeek, GLM, Qwen, Mixtral and gpt-oss."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((text[name] for name in names if isinstance(text.get(name), int) and text[name] > 0), None)
    if count is None or any(text.get(switch) is False for switch in ("is_moe", "enable_moe_block")):
        return None
    size = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    other = int(text["intermediate_size"]) if family.startswith(_DENSE_BESIDE) else 0
    biased = family.startswith("GptOss")
    return Experts(
        count=count,
        top_k=int(text.get("num_experts_per_tok") or 1),
        ffn_hidden_size=size,
        normalize_top_k=bool(text.get("norm_topk_prob", True)),
        shared_ffn_hidden_size=shared or other or int(text.get("n_shared_experts") or 0) * size,
        dense_layers=decoders.dense_layers(text, layers),
        shared_gate=bool(shared),
        biases=(2 * size + int(text["hidden_size"])) * biased,
        router_biases=count * biased,
    )


def _vision(raw: Raw) -> tuple[int, bool]:
    """Return the parameters of the part that sees, and whether all parts besides the decoder are counted."""
    seeing = raw.get("vision_config")
    others = any(isinstance(raw.get(name), Mapping) for name in ("audio_config", "talker_config", "thinker_config"))
    if not isinstance(seeing, Mapping):
        return 0, not others
    kind = str(raw.get("model_type") or seeing.get("model_type") or "")
    if not kind.startswith(_VISION_QWEN2_5 + _VISION_QWEN3):
        return 0, False
    hidden, inner = int(seeing["hidden_size"]), int(seeing["intermediate_size"])
    merged = hidden * int(seeing.get("spatial_merge_size", 2)) ** 2
    output = int(seeing["out_hidden_size"])
    patch = _PATCH_CHANNELS * int(seeing.get("temporal_patch_size", 2)) * int(seeing["patch_size"]) ** 2 * hidden
    merger = merged * (merged + 1) + (merged + 1) * output
    attention = hidden * (4 * hidden + 4)
    if kind.startswith(_VISION_QWEN2_5):
        block = 2 * hidden + attention + 3 * hidden * inner + 2 * inner + hidden
        return patch + int(seeing["depth"]) * block + hidden + merger, not others
    block = 4 * hidden + attention + 2 * hidden * inner + inner + hidden
    ends = patch + hidden + int(seeing["num_position_embeddings"]) * hidden + 2 * hidden + merger
    deep = len(seeing.get("deepstack_visual_indexes") or ())
    return ends + int(seeing["depth"]) * block + deep * (2 * merged + merger), not others
