"""What Megatron is told of its dispatcher, asked of Megatron's own configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, catalog
from gspo_hpc.policy.model import transformer_config


def told(tmp_path: Path, model: str, dispatcher: str) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(catalog.content(model)))
    parallel = {"expert_model_parallel_size": 2} if "A3B" in model else {}
    raw = {"cluster": {"platform": "cpu"}, "moe": {"token_dispatcher": dispatcher}, "parallel": parallel}
    return transformer_config(architecture.read(tmp_path), from_dict(raw))


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_the_dispatcher_is_passed_on(tmp_path: Path, dispatcher: str) -> None:
    found = told(tmp_path, "Qwen3-30B-A3B", dispatcher)
    assert found.moe_token_dispatcher_type == dispatcher and found.variable_seq_lengths
    assert found.moe_flex_dispatcher_backend == "deepep"
    assert told(tmp_path, "Qwen3-0.6B", dispatcher).moe_token_dispatcher_type == "alltoall"


def test_megatron_refuses_allgather_with_packed_samples(tmp_path: Path) -> None:
    """Why it is not among the values: the day this fails it may be."""
    found = told(tmp_path, "Qwen3-30B-A3B", "alltoall")
    with pytest.raises(ValueError, match="does not support variable sequence length"):
        dataclasses.replace(found, moe_token_dispatcher_type="allgather")
    with pytest.raises(ValueError, match="moe.token_dispatcher is 'allgather'"):
        from_dict({"moe": {"token_dispatcher": "allgather"}})
