"""Mixtures of experts on gloo ranks: layouts, choices that are given, and how tokens were spread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gloo import cases
from tests.gloo.layouts import EXPERTS, ROUTED, SHAKEN, TAKEN, WITH_EXPERTS, Arrays
from tests.gloo.reference import assert_equal_steps, huggingface_logprobs


@pytest.mark.parametrize(("layout", "family"), WITH_EXPERTS)
def test_three_steps_with_experts_equal_one_rank(layout: str, family: str, results: dict[str, Arrays]) -> None:
    one, many = results[f"steps-one-{family}"], results[f"steps-{layout}-{family}"]
    assert_equal_steps(one, many)


@pytest.mark.parametrize("name", ["one", *SHAKEN])
def test_noise_tells_in_every_layout_how_far_rounding_moves_log_probs(name: str, results: dict[str, Arrays]) -> None:
    """Ranks learn the same; tensor-parallel ones still choose the same experts; and nothing of the noise stays."""
    one, found = results["shaken-one"], results[f"shaken-{name}"]
    assert (found["gaps"] == found["gaps"][0]).all() and np.array_equal(found["before"], found["after"])
    mean = found["gaps"][0][3]
    assert 0.25 * one["gaps"][0][3] < mean < 4.0 * one["gaps"][0][3] and mean < 1.0


def test_noise_tells_in_a_model_without_experts_too_how_far_rounding_moves_log_probs(
    results: dict[str, Arrays],
) -> None:
    found = results["shaken-dense"]
    assert np.array_equal(found["before"], found["after"]) and 0.005 < found["gaps"][0][3] < 0.2


@pytest.mark.parametrize("name", TAKEN)
def test_experts_are_gathered_while_the_last_ones_are_loaded(name: str, results: dict[str, Arrays]) -> None:
    """Also where one expert of every rank is more than a half of the memory. Events are counted, not timed.

    An engine loads only when it is waited for, so what follows a "loaded" was not gathered beside it. Memory does not
    grow in the middle: it has two halves, or the 65,536 bytes of the largest parameter, from the beginning.
    """
    found, (_, _, half, counts) = results[f"taken-{name}"], TAKEN[name]
    events = found["events"].tolist()
    assert found["asked"].tolist() == [max(2 * half, 65_536)] and not found["different"].size
    experts = [number for number, one in enumerate(events) if one.startswith("gathered") and one != "gathered 0"]
    assert sorted(events[number] for number in experts) == sorted(f"gathered {count}" for count in counts * 4)
    assert [events[number - 1] for number in experts] == ["post"] * len(experts)


@pytest.mark.parametrize("family", EXPERTS)
def test_tokens_go_to_the_experts_that_are_given(
    family: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    """Log-probs are then those of transformers with these experts, and those of its own choice where none are given."""
    ours = results[f"routed-one-{family}"]
    for kind, given in (("given", True), ("own", False), ("refused", False)):
        theirs = huggingface_logprobs(models[family], given)
        keys = [key for key in theirs if not key.startswith(("experts/", "logits/"))]
        assert max(float(np.abs(ours[f"{kind}/{key}"] - theirs[key]).max()) for key in keys) < 1e-4
    assert max(float(np.abs(ours[f"given/{key}"] - ours[f"own/{key}"]).max()) for key in keys) > 1e-2


@pytest.mark.parametrize("family", EXPERTS)
def test_recorded_experts_are_those_of_hugging_face(
    family: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    ours, theirs = results[f"routed-one-{family}"], huggingface_logprobs(models[family])
    names = [name for name in theirs if name.startswith("experts/")]
    assert names
    for name in names:
        slot, index, layer = name.removeprefix("experts/").split("-")
        both = (ours[f"experts/{slot}--1"], ours[f"experts/{slot}-{index}"])
        assert np.array_equal(np.sort(np.concatenate(both)[:, int(layer)], -1), theirs[name]), name


@pytest.mark.parametrize("layout", ROUTED)
def test_choices_are_given_and_recorded_in_every_layout(layout: str, results: dict[str, Arrays]) -> None:
    one, many = results[f"routed-one-{EXPERTS[-1]}"], results[f"routed-{layout}-{EXPERTS[-1]}"]
    assert one.keys() == many.keys()
    for name in one:
        if name.startswith("experts/"):
            assert np.array_equal(np.sort(one[name], -1), np.sort(many[name], -1)), name
        else:
            np.testing.assert_allclose(many[name], one[name], atol=2e-5)


@pytest.mark.parametrize("layout", ROUTED)
def test_three_steps_with_given_experts_equal_one_rank(layout: str, results: dict[str, Arrays]) -> None:
    """Also where layers are computed again: each micro-batch must find its own choices then."""
    one, many = results[f"given-one-{EXPERTS[-1]}"], results[f"given-{layout}-{EXPERTS[-1]}"]
    assert_equal_steps(one, many)
    assert one["experts/replay_changed"].min() > 0.5  # hardly anything goes where its router would have sent it


def test_updates_repeat_the_choices_of_the_old_policy(results: dict[str, Arrays]) -> None:
    """Nothing changes while the weights do not; afterwards tokens go where they went, and routers would have moved."""
    own, repeated = results[f"moved-{EXPERTS[-1]}"], results[f"repeated-{EXPERTS[-1]}"]
    assert "experts/replay_changed" not in own
    changed = repeated["experts/replay_changed"]
    assert changed[0] == 0.0 and changed[1:].min() > 0.05
    np.testing.assert_allclose(repeated["grad_norm"][0], own["grad_norm"][0], rtol=1e-5)
    for name in ("tokens_min", "tokens_max", "imbalance"):
        assert len(set(repeated[f"experts/{name}"])) == 1
    assert len(set(own["experts/tokens_max"])) > 1 or len(set(own["experts/imbalance"])) > 1


def test_tokens_are_counted_where_they_went(results: dict[str, Arrays]) -> None:
    """The metrics of a step on samples that share nothing, against the experts that were recorded."""
    steps, recorded = results["counted"], results[f"routed-one-{EXPERTS[-1]}"]
    counts: dict[int, np.ndarray] = {}
    for group in cases.groups():
        for index, completion in enumerate(group.completions):
            if completion.advantage != 0.0:  # the others are not computed
                rows = np.concatenate((recorded[f"experts/{group.slot}--1"], recorded[f"experts/{group.slot}-{index}"]))
                for layer in range(rows.shape[1]):
                    found = np.bincount(rows[:, layer].ravel(), minlength=8)
                    counts[layer] = counts.get(layer, 0) + found
    tokens = np.array([counts[layer] for layer in sorted(counts)], dtype=np.float64)
    imbalance = tokens.max(1) / tokens.mean(1)
    expected = {
        "tokens_mean": tokens.mean(),
        "tokens_min": tokens.min(),
        "tokens_max": tokens.max(),
        "imbalance": imbalance.mean(),
        "imbalance_max": imbalance.max(),
        "idle": (tokens == 0).sum(),
    }
    for ranks in ("counted", "counted-ep2", "counted-etp2"):  # padding of sequence parallelism does not count
        found = {name: float(results[ranks][f"experts/{name}"][0]) for name in expected}
        assert found == pytest.approx(expected), ranks
    assert steps["experts/tokens_max"][0] > steps["experts/tokens_min"][0]
