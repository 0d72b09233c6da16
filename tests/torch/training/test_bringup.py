"""What a config says reaches the engine's settings. Takes milliseconds; catches a setting that is lost on the way.

No run has to show it: an engine that measures another distribution than the trainer would only look a little worse.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.training.bringup import engine_settings


def settings_of(**sections: Any) -> Any:
    config = from_dict({"model": {"path": "Qwen/Qwen3-0.6B"}, **sections})
    return engine_settings(config, per_node=1, experts=False)


@pytest.mark.parametrize(
    ("rollout", "whole"),
    [({}, False), ({"top_p": 0.9}, True), ({"top_k": 20}, True), ({"top_p": 1.0, "top_k": -1}, False)],
)
def test_a_cut_distribution_is_measured_whole(rollout: dict[str, Any], whole: bool) -> None:
    """top_p and top_k cut what is sampled; log-probs are those of the whole distribution, as the trainer's are."""
    assert settings_of(rollout=rollout).whole_distribution is whole


def test_settings_are_those_of_the_config() -> None:
    found = settings_of(
        model={"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"},
        cluster={"platform": "cpu", "gpus_per_node": 2},
        rollout={
            "tensor_parallel_size": 2,
            "max_prompt_length": 30,
            "max_response_length": 70,
            "kv_cache_gb": 0.5,
            "engine": {"max_num_seqs": 3, "load_format": "auto"},
        },
        run={"seed": 2**32 + 5, "deterministic": True},
        faults={"engine_timeout": 77.0},
    )
    assert (found.max_model_len, found.tensor_parallel_size, found.kv_cache_gb, found.seed) == (100, 2, 0.5, 5)
    assert found.engine_args == {"max_num_seqs": 3, "load_format": "auto"} and found.loads_weights
    assert (found.platform, found.timeout, found.model_path) == ("cpu", 77.0, "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("given", "loads"), [({}, False), ({"load_format": "dummy"}, False), ({"load_format": "auto"}, True)]
)
def test_noise_is_no_weights(given: dict[str, Any], loads: bool) -> None:
    """An engine that has its weights gets adapters alone: it would have added them to noise."""
    assert settings_of(rollout={"engine": given}).loads_weights is loads


@pytest.mark.parametrize(("hidden", "threads"), [(64, 1), (255, 1), (256, 2), (4096, 2), (None, 2)])
def test_an_engine_of_a_tiny_model_has_one_thread(
    hidden: int | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads meet hundreds of times a step: with a busy core a rollout of seconds took minutes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3"} | ({"hidden_size": hidden} if hidden else {}))
    )
    found = settings_of(model={"path": str(tmp_path)}, cluster={"platform": "cpu"})
    assert found.threads == threads
