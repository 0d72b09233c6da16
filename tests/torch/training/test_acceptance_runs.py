"""Configs of the runs of the acceptance as a GPU would see them (1 s)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gspo_hpc.config.loader import load
from gspo_hpc.launch import checks
from tools.acceptance import models, runs
from tools.acceptance.environment import CUDA, Environment
from tools.acceptance.parts import adapters, deterministic, faults, memory, mixture, pair, revival, train
from tools.acceptance.rows import Recorder


@pytest.mark.parametrize("gpu", ["H100-80GB", "H200-141GB", None])
def test_runs_on_a_gpu_are_accepted_by_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str | None
) -> None:
    """The configs that only a GPU would see otherwise; of the models only config.json is made."""
    written: list[Path] = []
    monkeypatch.setattr(models, "light", lambda env: _folder(tmp_path / "light", "Qwen3ForCausalLM", _dense()))
    experts = CUDA.mixture
    monkeypatch.setattr(models, "mixture", lambda env: _folder(tmp_path / "mix", "Qwen3MoeForCausalLM", experts))

    def stop(env: Environment, name: str, config: Path, *overrides: str) -> None:
        written.append(config)
        raise StopIteration

    monkeypatch.setattr(runs, "Run", stop)
    env = Environment("cuda", tmp_path)
    parts = (train, faults, revival, memory, mixture, adapters, deterministic, pair)
    for part_of_runs in parts:
        with pytest.raises(StopIteration):
            part_of_runs.run(env, Recorder(tmp_path / "rows", "cuda"))
    assert len(written) == len(parts)
    for config in written:
        checks.require(load(str(config), [f"cluster.gpu={gpu}"] if gpu else []))


def _dense() -> dict[str, object]:
    names = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
        "vocab": "vocab_size",
    }
    return {own: CUDA.light[name] for name, own in names.items()} | {"tie_word_embeddings": True}


def _folder(folder: Path, architecture: str, settings: Mapping[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    kind = "qwen3_moe" if "Moe" in architecture else "qwen3"
    common = {"architectures": [architecture], "model_type": kind, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps({**common, "rms_norm_eps": 1e-6, **settings}))
    return folder
