"""Engines of the parts: settings, requests, and what they generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_hpc.data.records import Prompt
from gspo_hpc.engine.engine import Engine, EngineSettings, Sampling
from gspo_hpc.ops.hf_folder import Folder

from .environment import Environment

SHARE = 0.4  # of the card, for an engine beside a trainer


def make(env: Environment, model: Path, name: str, *, dtype: str = "", **engine_args: Any) -> Engine:
    """Return an engine that is not started; its processes write to a log of that name."""
    sizes = env.sizes
    return Engine(
        EngineSettings(
            model_path=str(model),
            dtype=dtype or sizes.dtype,
            platform=env.platform,
            max_model_len=sizes.prompt + sizes.length,
            kv_cache_gb=0.25,
            log_path=env.work / "logs" / f"{name}-engine.log",
            engine_args={**({"gpu_memory_utilization": SHARE} if env.cuda else {}), **engine_args},
        )
    )


def requests(env: Environment, model: Path, count: int) -> list[list[int]]:
    """Return prompts of random tokens, without those of the tokenizer's special ones."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return [rng.integers(vocabulary // 10, vocabulary, env.sizes.prompt).tolist() for _ in range(count)]


def generate(engine: Engine, prompts: list[list[int]], sampling: Sampling, samples: int = 1) -> list[list[int]]:
    """Return the tokens of all completions, by prompt and then by sample."""
    for slot, tokens in enumerate(prompts):
        engine.submit(slot, Prompt(slot, np.array(tokens, np.int32), "", {}), range(samples), sampling)
    found: dict[int, list[list[int]]] = {}
    while engine.pending:
        for group in engine.step():
            found[group.slot] = [completion.tokens.tolist() for completion in group.completions]
    return [tokens for slot in sorted(found) for tokens in found[slot]]


def stored(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights of a folder, as an engine is sent them."""
    folder = Folder(model)
    for name in sorted(folder.names()):
        yield name, folder.read(name)
