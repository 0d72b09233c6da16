"""Presets, contradictions and warnings of the objective."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.algorithms import PRESETS, Objective, resolve, updates_per_rollout, warnings
from gspo_hpc.config import Algorithm, Batch
from gspo_hpc.config_file import from_dict


def test_presets() -> None:
    assert resolve(Algorithm()) == Objective("sequence", 3e-4, 4e-4, "sequence", True, 0.0)
    assert resolve(Algorithm(name="gspo_token")) == Objective("sequence_token", 3e-4, 4e-4, "sequence", True, 0.0)
    assert resolve(Algorithm(name="grpo")) == Objective("token", 0.2, 0.2, "sequence", True, 0.0)
    assert PRESETS.keys() == {"gspo", "gspo_token", "grpo"}


def test_keys_override_the_preset_one_by_one() -> None:
    assert resolve(Algorithm(clip_low=1e-3)) == Objective("sequence", 1e-3, 4e-4, "sequence", True, 0.0)
    changed = Algorithm(name="grpo", clip_high=0.28, aggregation="token", normalize_advantage=False, kl_beta=0.04)
    assert resolve(changed) == Objective("token", 0.2, 0.28, "token", False, 0.04)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (Algorithm(aggregation="token"), "weigh sequences by their length"),
        (Algorithm(name="gspo_token", aggregation="token"), "weigh sequences by their length"),
        (Algorithm(clip_low=1.0), r"clip_low \(1.0\) must be above 0 and below 1"),
        (Algorithm(clip_low=0.0), "clip_low"),
        (Algorithm(clip_low=float("nan")), "clip_low"),
        (Algorithm(clip_high=0.0), r"clip_high \(0.0\)"),
        (Algorithm(clip_high=float("inf")), "clip_high"),
        (Algorithm(kl_beta=-0.1), r"kl_beta \(-0.1\) must be 0 or more"),
        (Algorithm(kl_beta=float("nan")), "kl_beta"),
    ],
)
def test_contradictions_are_refused_with_the_reason(algorithm: Algorithm, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(algorithm)


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        resolve(Algorithm(aggregation="token", clip_low=2.0, clip_high=-1.0, kl_beta=-1.0))
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("batch", "updates"),
    [
        (Batch(), 1),
        (Batch(steps_per_generation=4), 4),
        (Batch(steps_per_generation=4, num_iterations=2), 8),
        (Batch(num_iterations=3), 3),
        (Batch(global_batch_size=8, generation_batch_size=32), 4),
        (Batch(global_batch_size=8, generation_batch_size=8, num_iterations=2), 2),
        (Batch(global_batch_size=8, generation_batch_size=9), 2),
    ],
)
def test_updates_per_rollout(batch: Batch, updates: int) -> None:
    assert updates_per_rollout(batch) == updates


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"batch": {"steps_per_generation": 4}}, []),
        ({"batch": {"num_iterations": 2}}, []),
        ({"batch": {"steps_per_generation": 1}}, ["clipping is inert"]),
        ({"batch": {"global_batch_size": 8, "generation_batch_size": 8}}, ["clipping is inert"]),
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"clip_low": 0.2, "clip_high": 0.2}}, ["single tokens"]),
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"clip_high": 0.05}}, ["0.05"]),
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"clip_high": 0.049}}, []),
        (
            {"batch": {"steps_per_generation": 4}, "algorithm": {"name": "gspo_token", "clip_low": 0.2}},
            ["single tokens"],
        ),
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"name": "grpo"}}, []),
        (
            {"batch": {"steps_per_generation": 4}, "algorithm": {"name": "grpo", "clip_low": 3e-4}},
            ["nearly everything"],
        ),
        ({"algorithm": {"clip_low": 0.2}}, ["clipping is inert", "single tokens"]),
    ],
)
def test_warnings(raw: dict[str, Any], words: list[str]) -> None:
    found = warnings(from_dict(raw))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_warnings_refuse_what_cannot_be_resolved() -> None:
    with pytest.raises(ValueError, match="aggregation"):
        warnings(from_dict({"algorithm": {"aggregation": "token"}}))
