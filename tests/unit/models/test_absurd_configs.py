"""Any config.json is planned or refused in one line, whatever stands in it (10 s).

It would catch a traceback, or a list with a million million layers, for the file of a model that somebody else wrote.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.plan import make_plan

VALUES = st.sampled_from(
    [0, -1, 1, 3, 7, 10**12, -(10**9), 1.5, float("inf"), float("nan"), "x", "", None, True, [], [1], {}, {"a": 1}]
)


def planned(folder: Path, raw: dict[str, Any], ranks: int = 1, stages: int = 1) -> tuple[set[str], list[str]]:
    (folder / "config.json").write_text(json.dumps(raw))
    config = from_dict(
        {
            "cluster": {"gpus_per_node": 8, "gpu": "H100"},
            "model": {"path": str(folder)},
            "parallel": {"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages},
            "batch": {"micro_batch_tokens": 8192, "global_batch_size": 64, "num_generations": 8},
            "rollout": {"max_prompt_length": 512, "max_response_length": 2048, "tensor_parallel_size": ranks},
        }
    )
    plan = make_plan(config)
    return {item.rule for item in plan.broken}, [item.message for item in plan.broken]


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the config of a known model with up to three other values, inside its parts too."""
    raw: dict[str, Any] = json.loads(json.dumps(catalog.content(draw(st.sampled_from(catalog.names())))))
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([raw, *(value for value in raw.values() if isinstance(value, dict) and value)]))
        part[draw(st.sampled_from(sorted(part)))] = json.loads(json.dumps(draw(VALUES)))
    return raw


@given(spoilt(), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2]))
@settings(max_examples=150, deadline=None)
def test_no_value_ends_in_a_traceback(raw: dict[str, Any], ranks: int, stages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, messages = planned(Path(folder), raw, ranks, stages)
    assert all(len(text.splitlines()) == 1 and len(text) < 600 for text in messages)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_attention_heads", 0, "num_attention_heads is '0'; it must be a whole number from 1 to"),
        (
            "num_hidden_layers",
            10**12,
            "num_hidden_layers is '1000000000000'; it must be a whole number from 1 to 10000",
        ),
        ("hidden_size", "4096", "hidden_size is '4096'; it must be a whole number"),
        ("vocab_size", True, "vocab_size is 'True'"),
        ("head_dim", 1.5, "head_dim is '1.5'"),
    ],
)
def test_a_size_that_no_model_has_is_named(tmp_path: Path, name: str, value: object, told: str) -> None:
    raw = catalog.content("Qwen3-8B")
    rules, messages = planned(tmp_path, raw | {name: value})
    assert rules == {"model_config_readable"} and told in messages[0]
    with pytest.raises(ValueError, match=re.escape(told)):
        architecture.read(tmp_path)
    rules, _ = planned(tmp_path, {"architectures": ["FooForCausalLM"], "text_config": raw | {name: value}})
    assert rules == {"model_config_readable"}


def test_whole_numbers_may_be_written_with_a_point_and_0_stands_for_none(tmp_path: Path) -> None:
    raw = catalog.content("Qwen3-8B")
    assert planned(tmp_path, raw | {"max_position_embeddings": 40960.0, "num_experts": 0}) == planned(tmp_path, raw)
