"""The names that families have for the same sizes in config.json, brought to those that all else reads.

The table has the `attribute_map` of every decoder of transformers, and the names of a few that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
        "num_decoder_attention_heads",
    ),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "d_inner"),
    "max_position_embeddings": (
        *("n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length", "max_target_positions"),
        *("max_sequence_length", "seq_length"),
    ),
}
_INNER = {  # of sections inside, as DBRX has them
    "num_key_value_heads": ("attn_config", "kv_n_heads"),
    "intermediate_size": ("ffn_config", "ffn_hidden_size"),
    "num_experts": ("ffn_config", "moe_num_experts"),
    "num_experts_per_tok": ("ffn_config", "moe_top_k"),
}
_USUAL_INNER = 4  # times the hidden size, where GPT-2 and its like give none


def usual(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the usual names beside those that it has, of its text model, too."""
    found = _with_usual(raw)
    if isinstance(text := raw.get("text_config"), Mapping):
        found["text_config"] = _with_usual(text)
    return found


def _with_usual(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(raw)

    def add(name: str, value: Any) -> None:
        if found.get(name) is None and type(value) is int:
            found[name] = value

    if raw.get("model_type") == "longcat_flash" and type(layers := raw.get("num_layers")) is int:
        add("num_hidden_layers", 2 * layers)  # each has attention twice
    if raw.get("multi_query") is True and not raw.get("new_decoder_architecture"):  # Falcon, StarCoder
        add("num_key_value_heads", 1)
    for name, (section, own) in _INNER.items():
        add(name, inner.get(own) if isinstance(inner := raw.get(section), Mapping) else None)
    for name, others in _NAMES.items():
        for other in others:
            add(name, raw.get(other))
    if isinstance(blocks := raw.get("layers_block_type"), list):  # Nemotron-H
        add("num_hidden_layers", len(blocks))
    if isinstance(sizes := raw.get("intermediate_size"), list) and sizes and all(type(size) is int for size in sizes):
        found["intermediate_size"] = max(sizes)  # Gemma 3n has one for every layer
    hidden = found.get("hidden_size")
    if type(hidden) is int and (raw.get("hidden_size") is None or "n_layer" in raw or "num_layers" in raw):
        add("intermediate_size", hidden * _USUAL_INNER)
    return found
