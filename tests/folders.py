"""A folder of a model with all files that a run looks for before it starts, of a few bytes each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo_hpc.models import architecture, weight_table

MODEL: dict[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0},
}
# One token for each character of ASCII, as the library tokenizers writes it.
TOKENIZER: dict[str, Any] = {
    **{"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None},
    **{"truncation": None, "padding": None, "decoder": {"type": "Fuse"}},
    "model": {"type": "BPE", "vocab": {chr(code): code for code in range(128)}, "merges": [], "unk_token": "\0"},
}


def safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A file of float32 tensors, as the format says."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def tensors() -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors of MODEL."""
    table = weight_table.stage_table(architecture.parse(MODEL), 0, MODEL["num_hidden_layers"], True, True)
    return {name: shape for mapping in table for name, shape in zip(mapping.hf, mapping.shapes, strict=True)}


def model_folder(folder: Path) -> Path:
    """A model in two shards, with a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    every = list(tensors().items())
    index: dict[str, str] = {}
    for number, part in enumerate((every[:2], every[2:]), 1):
        safetensors(folder / f"model-{number}.safetensors", dict(part))
        index |= dict.fromkeys(dict(part), f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}"}))
    return folder
