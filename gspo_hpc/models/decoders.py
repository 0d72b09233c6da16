"""Traits of families of decoders that their config.json does not say: gates of MLPs, tied heads, learned positions.

A family is a model_type of transformers. tests/torch/models/test_decoder_counts.py builds every one of them and holds
these tables against it. A family that is in none of them is counted as a Llama, and :func:`doubt` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]

_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text ernie megatron-bert roberta roberta-prelayernorm "
    "xlm xlm-roberta xlm-roberta-xl"
)
# MLPs of two matrices, where others have a third one for a gate.
UNGATED = frozenset(
    "apertus arcee bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom "
    "camembert codegen ctrl data2vec-text electra ernie falcon fuyu git gpt-sw3 gpt2 gpt_bigcode gpt_neo "
    "gpt_neox gpt_neox_japanese gptj jais2 marian mbart megatron-bert mpt mvp nanochat nemotron openai-gpt opt "
    "pegasus persimmon phi plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer starcoder2 "
    "trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod".split()
)
# The head is the embedding where config.json does not say tie_word_embeddings; else it is a matrix of its own.
TIED = frozenset(
    "bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert "
    "cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl data2vec-text electra ernie ernie4_5 "
    "ernie4_5_moe falcon gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified "
    "gemma4_unified_text got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa jetmoe lfm2 "
    "lfm2_moe marian mbart megatron-bert minicpm3 modernbert-decoder mpt mvp openai-gpt opt pegasus plbart "
    "prophetnet recurrent_gemma roberta roberta-prelayernorm roc_bert roformer smollm3 starcoder2 trocr "
    "vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya".split()
)
# Learned positions: a row for each of max_position_embeddings, and so many more.
LEARNED = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "openai-gpt", "trocr", "whisper"), 0),
    **dict.fromkeys(_ENCODERS.split(), 2),  # or of two kinds of tokens
    **dict.fromkeys(
        "bart bigbird_pegasus biogpt blenderbot blenderbot-small mbart mvp opt plbart prophetnet".split(), 2
    ),
}
# Decoders of models with an encoder, whose layers look at it through four more matrices of the hidden size.
CROSSED = frozenset(
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper".split()
)
# Families whose parameters are counted to within 1 %: what is left out are biases, norms and other small parts.
CLOSE = frozenset(
    "afmoe apertus arcee aria_text axk1 axk2 bart bert bert-generation biogpt bitnet blenderbot "
    "blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe ctrl cwm data2vec-text dbrx "
    "deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 emu3 ernie ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe falcon flex_olmo fuyu gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite "
    "glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa "
    "granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax "
    "inkling_text jais2 kimi_linear laguna lfm2 lfm2_moe llama llama4_text longcat_flash marian mbart "
    "megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral "
    "mixtral mllama_text_model modernbert-decoder moshi mpt mvp nanochat nemotron olmo olmo2 olmo3 olmo_hybrid "
    "olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text "
    "qwen3_5_text qwen3_moe qwen3_next roberta roberta-prelayernorm roformer seed_oss smollm3 solar_open "
    "stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl youtu zaya".split()
)
_MAMBA, _SHARED = "layers of Mamba are counted as attention", "layers that share their weights are counted one by one"
# Others: by how many % their count is wrong with the sizes that transformers gives them by default, and why.
APART: dict[str, tuple[int, str]] = {
    "bamba": (-20, _MAMBA),
    "big_bird": (-1, "the layer before its head is not counted"),
    "bigbird_pegasus": (-21, "alone, its decoder has a head of its own"),
    "cpmant": (-65, "prompts and tables of distances are not counted"),
    "deepseek_v4": (2, "attention to compressed tokens is counted as attention"),
    "electra": (27, "its embedding is counted with the hidden size"),
    "falcon_h1": (-6, "Mamba beside attention is not counted"),
    "gemma4_text": (-1, "larger heads of some layers are not counted"),
    "gemma4_unified_text": (-2, "larger heads of some layers are not counted"),
    "git": (-49, "the part that sees is not counted"),
    "granitemoehybrid": (-3, _MAMBA),
    "hrm_text": (183, _SHARED),
    "hy_v4": (-1, "attention to chosen tokens is counted as attention"),
    "jamba": (-3, _MAMBA),
    "jetmoe": (-14, "experts of attention are counted as one"),
    "mamba2": (22, _MAMBA),
    "minimax": (-1, "linear attention is counted as attention"),
    "nemotron_h": (136, "each layer is counted as attention and an MLP, and has one of them, or Mamba"),
    "phi4_multimodal": (-17, "the parts that see and hear are not counted"),
    "prophetnet": (-3, "attention to n-grams is not counted"),
    "recurrent_gemma": (5, "recurrent layers are counted as attention"),
    "reformer": (-71, "positions are not counted"),
    "rembert": (9, "its embedding and head are counted with the hidden size"),
    "roc_bert": (-13, "embeddings of sound and shape are not counted"),
    "xlnet": (-7, "attention to distances is not counted"),
    "xlstm": (-63, "recurrent layers are counted as attention"),
    "xmod": (-7, "adapters of languages are not counted"),
    "zamba": (191, _SHARED),
    "zamba2": (131, _SHARED),
}
KNOWN = CLOSE | APART.keys()
_OLDER = {"refinedweb": "falcon", "refinedwebmodel": "falcon", "rw": "falcon"}
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # layers before the first mixture
_SUFFIX = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")


def kind(raw: Raw, text: Raw) -> str:
    """Return the model_type of the decoder in a config.json; that of its architecture's name if it gives none."""
    given = str(text.get("model_type") or raw.get("model_type") or "").lower()
    if not given:
        given = _SUFFIX.sub("", str((raw.get("architectures") or [""])[0])).lower()
    squeezed = _squeezed(given)
    return _OLDER.get(squeezed) or next((name for name in sorted(KNOWN) if _squeezed(name) == squeezed), given)


def _squeezed(name: str) -> str:
    return re.sub("[-_]", "", name)


def tied(raw: Raw, text: Raw, named: str) -> bool:
    """Return whether the head is the embedding."""
    given = next(
        (part["tie_word_embeddings"] for part in (raw, text) if part.get("tie_word_embeddings") is not None), None
    )
    return not TIED.isdisjoint((named, str(raw.get("model_type")))) if given is None else bool(given)


def inner_size(text: Raw, named: str) -> int:
    """Return the inner size of an MLP that is no expert."""
    given = next((text[name] for name in ("intermediate_size_mlp", "dense_intermediate_size") if text.get(name)), None)
    hidden, usual = int(text["hidden_size"]), 4 * (named in UNGATED)
    size = int(given or text.get("intermediate_size") or hidden * int(text.get("intermediate_multiple_size") or usual))
    if named in ("moshi", "recurrent_gemma"):  # whose name means both halves of the first product
        return size // 2
    if text.get("block_auto_adjust_ff_dim"):  # LFM2
        size = int(2 * size / 3 * float(text.get("block_ffn_dim_multiplier") or 1.0))
        block = int(text.get("block_multiple_of") or 1)
        return -(-size // block) * block
    return size


def first_parameters(text: Raw, named: str) -> int:
    """Count what the first stage has beside the embedding: learned positions, and embeddings that every layer gets."""
    hidden, vocabulary = int(text["hidden_size"]), int(text["vocab_size"])
    found = 0
    if named in LEARNED:
        found += (int(text.get("max_position_embeddings") or 0) + LEARNED[named]) * hidden
    if narrow := int(text.get("word_embed_proj_dim") or 0) if named == "opt" else 0:  # opt-350m
        found += (narrow != hidden) * (2 * hidden * narrow - vocabulary * (hidden - narrow))
    if size := int(text.get("hidden_size_per_layer_input") or 0):  # Gemma 3n and 4
        rows = int(text.get("vocab_size_per_layer_input") or vocabulary)
        found += int(text["num_hidden_layers"]) * size * (rows + 3 * hidden)
    return found


def dense_layers(text: Raw, layers: int) -> tuple[int, ...]:
    """Return the layers of a mixture that have an MLP in its place."""
    if isinstance(given := text.get("mlp_layer_types"), list) and len(given) == layers:
        return tuple(layer for layer, one in enumerate(given) if one == "dense")
    if text.get("model_type") == "longcat_flash":  # two of attention and MLP, and one mixture beside the first
        return tuple(range(1, layers, 2))
    if isinstance(mixed := text.get("moe_layers"), list):
        return tuple(layer for layer in range(layers) if layer not in mixed)
    if isinstance(given := text.get("moe_layer_freq"), list) and len(given) == layers:  # MiMo-V2
        return tuple(layer for layer, mixture in enumerate(given) if not mixture)
    if (step := int(text.get("interleave_moe_layer_step") or 1)) > 1:  # Llama 4
        return tuple(layer for layer in range(layers) if (layer + 1) % step)
    if period := int(text.get("expert_layer_period") or 0):  # Jamba
        return tuple(layer for layer in range(layers) if layer % period != int(text.get("expert_layer_offset") or 0))
    first = next((int(text[name]) for name in _FIRST if text.get(name)), 0)
    last = text.get("moe_layer_end_index")
    last = last if isinstance(last, int) and last >= 0 else layers - 1
    step, interval = int(text.get("decoder_sparse_step") or 1), int(text.get("moe_layer_interval") or 1)
    every, without = int(text.get("moe_layer_freq") or 1), set(text.get("mlp_only_layers") or ())
    return tuple(
        layer
        for layer in range(layers)
        if not first <= layer <= last
        or layer in without
        or (layer + 1) % step
        or (layer + 1) % interval
        or layer % every
    )


def doubt(family: str, raw: Raw, text: Raw, named: str) -> str:
    """Return how exact the count of a family is, with the direction in which it is wrong."""
    if named in CLOSE:
        return f"{family} is counted to within about 1 %, without some of its biases, norms and other small parts"
    if named in APART:
        percent, reason = APART[named]
        way = "too high" if percent > 0 else "too low"
        return (
            f"{family} is counted {way}, by {abs(percent)} % with the sizes that transformers has by default: {reason}"
        )
    found = f"{family} is not known here and is counted like Llama: its MLPs have a third less if they have no gate"
    if raw.get("tie_word_embeddings") is None and text.get("tie_word_embeddings") is None:
        found += ", and it has a vocabulary less if its head is tied, which its config.json does not say"
    return found
