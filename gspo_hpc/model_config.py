"""What a Hugging Face config.json says about a model: the supported families and the sizes that everything needs.

Floor 1: plain Python. An architecture or a setting that is not supported is refused by name, never ignored.
Keys are those of Hugging Face's Llama, Qwen2 and Qwen3 configurations (transformers 4 and 5 spell the rotary settings
differently; both are read).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a dense decoder. Lengths in tokens, sizes in elements."""

    family: str  # one of SUPPORTED
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool


def read(folder: str | Path) -> Architecture:
    """The architecture in `folder`/config.json. ValueError says what is missing or not supported."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model.path {folder} has no config.json: it must be a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return parse(raw, str(path))


def parse(raw: dict[str, Any], where: str = "config.json") -> Architecture:
    """The architecture in the content of a config.json; `where` names it in errors."""
    families = raw.get("architectures") or []
    family = families[0] if families else None
    if family not in SUPPORTED:
        raise ValueError(f"{where}: architecture {family} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse(raw, where)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        return Architecture(
            family=family,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden,
            ffn_hidden_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw, where),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "Qwen2ForCausalLM",
            qk_norm=family == "Qwen3ForCausalLM",
        )
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]} is missing") from None


def _rope_theta(raw: dict[str, Any], where: str) -> float:
    rope = dict(raw.get("rope_parameters") or {})
    scaling = raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ValueError(f"{where}: rope_type {kind} is not supported; supported: default")
    return float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _refuse(raw: dict[str, Any], where: str) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "attention_dropout": (0, 0.0),
        "quantization_config": (),
        "partial_rotary_factor": (1, 1.0),
        "pretraining_tp": (1,),
    }
    for key, allowed in expected.items():
        value = raw.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(map(str, allowed)) or "absent"
            raise ValueError(f"{where}: {key} = {str(value)[:60]} is not supported; it must be {shown}")
