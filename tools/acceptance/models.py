"""Models and data of the parts, made here without a network, once for all parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_random_model import make_random_model, make_tokenizer

from .environment import Environment

SMALL = {  # of the comparison with the CPU
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def dense(env: Environment) -> Path:
    """Return the folder of the random dense model."""
    return _once(env.work / "models" / "dense", lambda out: make_random_model(out, **env.sizes.model))


def light(env: Environment) -> Path:
    """Return the folder of the random dense model of whole runs."""
    return _once(env.work / "models" / "light", lambda out: make_random_model(out, **env.sizes.light))


def mixture(env: Environment) -> Path:
    """Return the folder of the random mixture of experts."""
    settings = {**env.sizes.mixture, "initializer_range": 0.05, "max_position_embeddings": 2048}
    return _once(env.work / "models" / "mixture", lambda out: _from_config(out, "qwen3_moe", settings))


def small(env: Environment, kind: str) -> Path:
    """Return the folder of a small model, ``llama`` or ``qwen3_moe``."""
    settings = SMALL | (EXPERTS if kind == "qwen3_moe" else {})
    return _once(env.work / "models" / f"small-{kind}", lambda out: _from_config(out, kind, settings))


def prompts(env: Environment) -> Path:
    """Return a file of text prompts that the models' tokenizer of characters knows."""
    file = env.work / "prompts.jsonl"
    if not file.exists():
        rows = ({"prompt": f"{a} + {b} = ?", "answer": a + b} for a in range(16) for b in range(16))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _from_config(out: Path, kind: str, settings: dict[str, Any]) -> None:
    import torch
    import transformers

    tokenizer = make_tokenizer(settings["vocab_size"])
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **settings, **ids)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder, whole or not at all: a part may be ended at any time."""
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(folder)
    return folder
