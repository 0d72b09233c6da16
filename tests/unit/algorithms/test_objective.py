"""Algorithms: defaults, ranges, contradictions and warnings of the objective."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.algorithms.objective import Objective, resolve, warnings
from gspo_hpc.config.algorithm import AlgorithmSettings
from gspo_hpc.config.derived import updates_per_rollout
from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.config.plugins import algorithms
from gspo_hpc.config.schema import Batch, Config


def algorithm(**keys: Any) -> AlgorithmSettings:
    return from_dict({"algorithm": keys}).algorithm


def test_defaults() -> None:
    assert resolve(algorithm()) == Objective("sequence", 3e-4, 4e-4, "sequence", True, 0.0)
    assert resolve(algorithm(name="gspo_token")) == Objective("sequence_token", 3e-4, 4e-4, "sequence", True, 0.0)
    assert resolve(algorithm(name="grpo")) == Objective("token", 0.2, 0.2, "sequence", True, 0.0)
    assert next(iter(algorithms())) == "gspo" and {"grpo", "gspo_token"} < set(algorithms())  # the default one first
    assert type(Config().algorithm) is algorithms()["gspo"]


def test_keys_override_the_defaults_one_by_one() -> None:
    assert resolve(algorithm(clip_low=1e-3)) == Objective("sequence", 1e-3, 4e-4, "sequence", True, 0.0)
    changed = algorithm(name="grpo", clip_high=0.28, aggregation="token", normalize_advantage=False, kl_beta=0.04)
    assert resolve(changed) == Objective("token", 0.2, 0.28, "token", False, 0.04)


def test_null_is_the_default() -> None:
    """Configs in run directories of earlier versions have null for what was not given."""
    nothing = {"clip_low": None, "clip_high": None, "aggregation": None}
    assert algorithm(name="grpo", **nothing) == algorithm(name="grpo")
    assert algorithm(name=None, **nothing) == algorithm()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_contradictions_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.name {name}.*weigh sequences by their length"):
        resolve(algorithm(name=name, aggregation="token"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("clip_low", 1.0, "must be above 0 and below 1: .* nothing is clipped; found 1.0; gspo has 0.0003"),
        ("clip_low", 0.0, "must be above 0 and below 1"),
        ("clip_low", float("nan"), "must be a number; found nan"),
        ("clip_high", 0.0, "must be above 0; found 0.0; gspo has 0.0004"),
        ("clip_high", float("inf"), "must be a number; found inf"),
        ("kl_beta", -0.1, "must be 0 or more: .* away from the reference.*; found -0.1"),
        ("kl_beta", float("nan"), "must be a number; found nan"),
    ],
)
def test_values_out_of_range_are_refused_with_the_reason(key: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=f"config: algorithm.{key} {words}"):
        algorithm(**{key: value})


def test_all_values_out_of_range_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        algorithm(aggregation="sum", clip_low=2.0, clip_high=-1.0, kl_beta=-1.0)
    assert len(caught.value.problems) == 4


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
