"""Algorithms: defaults, ranges, contradictions and warnings of the objective."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.algorithms.objective import Objective, notes, resolve, warnings
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
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"clip_high": 0.1}}, ["0.1"]),
        ({"batch": {"steps_per_generation": 4}, "algorithm": {"clip_high": 0.099}}, []),
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


PRESETS = "gspo gspo_token grpo dr_grpo dapo cispo dppo sapo gmpo rloo reinforce_plus_plus maxrl".split()


def test_every_preset_makes_an_objective_without_warnings() -> None:
    assert set(PRESETS) == set(algorithms())
    for name in PRESETS:
        raw = {"algorithm": {"name": name}, "batch": {"steps_per_generation": 4}}
        assert (warnings(from_dict(raw)), notes(from_dict(raw))) == ([], []), name
        assert "arXiv" in algorithms()[name].paper
    assert algorithm(name="reinforce++") == algorithm(name="reinforce_plus_plus")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"trust_region": "mask"}, "mask compares the probabilities of single tokens, and algorithm.ratio is sequence"),
        ({"trust_region": "geometric"}, "geometric is made of ratios of single tokens"),
        ({"name": "gspo", "top_entropy_quantile": 0.2}, r"\(0.2\) drops .* ratio sequence has one .*name gspo_token"),
        ({"name": "gmpo", "top_entropy_quantile": 0.2}, "trust_region geometric has one term per sequence"),
        ({"name": "gmpo", "aggregation": "token"}, "geometric has one term per sequence.*use aggregation sequence"),
        ({"name": "gspo", "aggregation": "prompt"}, "mean over the tokens of a prompt would weigh sequences"),
        ({"name": "gspo", "aggregation": "fixed_length"}, "a sum of tokens would weigh sequences by their length"),
        ({"name": "cispo", "trust_region": "clip"}, r"clip_low \(1\) must be below 1 with trust_region clip"),
        ({"name": "sapo", "dual_clip": 3.0}, r"dual_clip \(3\) bounds a minimum, and trust_region gate has none"),
        ({"name": "grpo", "dual_clip": 1.1}, r"dual_clip \(1.1\) must be above 1 \+ clip_high \(1.2\), or 0"),
        ({"advantage": "gdpo", "kl_beta": 0.1, "kl_placement": "reward"}, "gdpo normalises every reward function by"),
        ({"advantage": "gdpo", "normalize_advantage": True}, "normalize_advantage true contradicts .*advantage gdpo"),
        ({"advantage": "maxrl", "normalize_advantage": True}, "normalize_advantage true contradicts .*advantage maxrl"),
        ({"correction": "masked", "correction_low": 5.0, "correction_high": 0.5}, "no ratio lies between them"),
        ({"correction": "rejection", "correction_low": 1.1, "correction_high": 2.0}, "must include 1"),
        ({"correction": "truncated", "correction_high": 0.5}, r"correction_high \(0.5\) must be at least 1"),
        ({"kl_target": 0.1}, "kl_target needs a weight to begin with"),
        ({"kl_beta": 0.1, "kl_target": 0.1, "kl_placement": "reward"}, "kl_placement is reward: use loss"),
        ({"kl_beta": 0.1, "kl_target": 0.1, "kl_estimator": "k2"}, "which k3 estimates"),
        ({"kl_beta": 0.1, "kl_placement": "reward", "kl_estimator": "unbiased"}, "kl_placement reward has none"),
        ({"kl_beta": 0.1, "kl_estimator": "k1"}, "k1 is no term of a loss: its gradient is zero in expectation"),
    ],
)
def test_combinations_without_meaning_are_refused_in_one_line(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        resolve(algorithm(**keys))
    assert len(str(caught.value).splitlines()) == 1


def test_defaults_that_follow_from_another_setting_are_written_out() -> None:
    assert not algorithm(advantage="batch_std").normalize_advantage
    bounds = {
        kind: (algorithm(correction=kind).correction_low, algorithm(correction=kind).correction_high)
        for kind in ("truncated", "masked", "rejection")
    }
    assert bounds == {"truncated": (0.5, 2.0), "masked": (0.5, 5.0), "rejection": (0.99, 1.01)}
    assert algorithm(correction="masked", correction_high=2.0).correction_high == 2.0


def test_what_changes_nothing_is_told() -> None:
    raw = {"algorithm": {"name": "grpo", "gate_positive": 2.0}, "batch": {"steps_per_generation": 4}}
    assert warnings(from_dict(raw)) == ["algorithm.gate_positive (2.0) changes nothing with trust_region clip"]


def test_unpublished_combinations_are_noted() -> None:
    assert (
        "trust_region gate with algorithm.ratio sequence"
        in notes(from_dict({"algorithm": {"trust_region": "gate"}}))[0]
    )
    assert "one term per sequence" in notes(from_dict({"algorithm": {"correction": "truncated"}}))[0]
    assert notes(from_dict({"algorithm": {"correction": "rejection"}})) == []
