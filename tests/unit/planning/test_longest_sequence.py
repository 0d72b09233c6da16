"""The longest sequence of a model with scaled rotary embeddings (2 s).

It would catch a kind of scaling that is not checked at all, or checked by another length than vLLM's, and a fix that
offers less than the longest response. tests/engine/test_limits.py asks vLLM itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import catalog, positions
from gspo_hpc.planning import installed
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan

RULE = "longest_sequence_fits_positions"
ORIGINAL = {"original_max_position_embeddings": 1024}


def of(model: str | Path, length: int, **more: Any) -> Config:
    rollout = {"max_prompt_length": 512, "max_response_length": length - 512}
    return from_dict({"model": {"path": str(model)}, "rollout": rollout, **more})


def broken(config: Config) -> list[str]:
    return [item.message for item in make_plan(config).broken if item.rule == RULE]


@pytest.mark.parametrize(
    ("rope", "newer", "older"),
    [
        (None, 2048, 2048),
        ({"rope_type": "default", "rope_theta": 1e4}, 2048, 2048),
        ({"type": "mrope", "mrope_section": [4, 6, 6]}, 2048, 2048),
        ({"rope_type": "llama3", "factor": 8.0, **ORIGINAL}, 2048, 2048),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0], **ORIGINAL}, 2048, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192, 8192),
        ({"type": "dynamic", "factor": 2.5}, 5120, 5120),
        ({"rope_type": "linear", "factor": None}, 2048, 2048),
        ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 2048, 4096),
        ({"type": "yarn", "factor": 4.0}, 2048, 8192),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}, 4096, 4096),
    ],
)
def test_the_longest_sequence_of_every_kind(rope: dict[str, Any] | None, newer: int, older: int) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        content = {"max_position_embeddings": 2048, name: rope}
        found = [positions.longest(content, yarn_scales=scales) for scales in (False, True)]
        assert [one.length for one in found if one is not None] == [newer, older]


def test_positions_by_other_names() -> None:
    def longest(**content: Any) -> int | None:
        found = positions.longest(content, yarn_scales=False)
        return found.length if found is not None else None

    assert longest(n_positions=1024) == 1024 and longest(max_position_embeddings=2048, seq_length=512) == 512
    assert longest(max_position_embeddings=8192, model_max_length=131072) == 131072
    assert longest(hidden_size=64) is None and longest(max_position_embeddings=None) is None
    assert longest(model_type="llama") == longest(model_type="llama", seq_length=4096) == 2048, "as transformers has it"
    assert longest(model_type="qwen2", seq_length=512) == 512 and longest(model_type="of nobody") is None
    assert longest(model_type="llama", max_position_embeddings=None) is None, "which is no default of transformers"
    assert longest(max_position_embeddings=10**400, seq_length=8) == 8
    scaled = {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert longest(model_type="gemma3_text", **scaled) == 131072 and longest(model_type="llama", **scaled) == 8 * 131072


@pytest.mark.parametrize("name", [*catalog.names(), *catalog.variants()])
def test_one_token_more_than_a_known_model_takes_is_refused(name: str) -> None:
    content = catalog.content(name)
    text = content.get("text_config", content)
    longest = positions.longest(text, yarn_scales=False)
    assert longest is not None
    assert broken(of(name, longest.length)) == []
    (message,) = broken(of(name, longest.length + 1))
    assert message.startswith(f"max_prompt_length + max_response_length = {longest.length + 1} must fit ")


@pytest.mark.parametrize(
    ("name", "longest"),
    [("Llama-3.1-8B-Instruct", 131072), ("deepseek-coder-6.7b", 65536), ("Qwen3-VL-8B", 262144), ("Qwen3-8B", 40960)],
)
def test_the_fix_is_the_longest_response(name: str, longest: int) -> None:
    (fix, *_) = search.find(of(name, longest + 60_000))
    assert str(fix) == f"rollout.max_response_length={longest - 512}"


def test_yarn_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan knows what runs by the vLLM here; without one it refuses only what no version takes, and warns of more."""
    rope = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1280, "rope_scaling": rope}))
    monkeypatch.setattr(installed, "yarn_scales", lambda: False)
    assert broken(of(tmp_path, 1280)) == []
    (message,) = broken(of(tmp_path, 1281))
    assert "= 1281 must fit max_position_embeddings (1280) of the model" in message and "give 4096 there" in message
    monkeypatch.setattr(installed, "yarn_scales", lambda: True)
    assert broken(of(tmp_path, 4096)) == []
    (message,) = broken(of(tmp_path, 4097))
    assert "must fit original_max_position_embeddings (1024) x factor (4) = 4096 positions of the model" in message
    monkeypatch.setattr(installed, "yarn_scales", lambda: None)
    assert broken(of(tmp_path, 4096)) == [] and len(broken(of(tmp_path, 4097))) == 1

    def warned(length: int) -> bool:
        return any("leave the factor of yarn aside" in text for text in make_plan(of(tmp_path, length)).warnings)

    assert [warned(length) for length in (1280, 1281, 4096, 4097)] == [False, True, True, False]
    assert str(search.find(of(tmp_path, 9000))[0]) == "rollout.max_response_length=3584"


def test_a_teacher_is_never_in_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest sequence is that of its rotary embeddings, whatever the vLLM here takes."""
    rope = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
    content = catalog.content("Qwen3-1.7B") | {"max_position_embeddings": 1024, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(content))
    monkeypatch.setattr(installed, "yarn_scales", lambda: False)
    teacher = {"algorithm": {"teacher": str(tmp_path), "kl_beta": 1.0}}

    def told(length: int) -> list[str]:
        return [item.message for item in make_plan(of("Qwen3-0.6B", length, **teacher)).broken if "fit" in item.message]

    assert told(4096) == []
    (message,) = told(4097)
    assert message.startswith("algorithm.teacher has the trainer's layout: ") and "positions of the teacher" in message
    assert "rollout.max_response_length=3584" in {str(fix) for fix in search.find(of("Qwen3-0.6B", 4097, **teacher))}
