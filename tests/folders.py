"""A folder of a model with all files that a run looks for before it starts, of a few bytes each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = {
    **{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0},
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


def model_folder(folder: Path) -> Path:
    """A model in two shards, with a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    safetensors(folder / "model-1.safetensors", {"a": (3, 5), "b": (2,)})
    safetensors(folder / "model-2.safetensors", {"c": (7,)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder
