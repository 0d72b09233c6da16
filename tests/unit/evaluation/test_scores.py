"""Scores against brute force: every way to draw, every outcome of every trial."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.evaluation.scores import avg_at_k, majority, mean_interval, pass_at_k, wilson_interval


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=7), min_size=1, max_size=4), st.integers(1, 4))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(table: list[list[bool]], k: int) -> None:
    shares = []
    for row in table:
        draws = list(itertools.combinations(row, k))
        shares.append(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at_k(table, k) == pytest.approx(shares, abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k([[True, False, False, False]], 2) == pytest.approx([0.5])
    assert pass_at_k([[True, False], [False, False]], 1) == pytest.approx([0.5, 0.0])
    assert pass_at_k([[False] * 400 + [True] * 600], 400) == [1.0]  # factorials far beyond a float


def test_avg_at_k_is_the_share_of_each_prompt() -> None:
    assert avg_at_k([[True, True, True, True], [False]]) == [1.0, 0.0]
    assert avg_at_k([[True, False, False, False], [True, True, False, False]]) == [0.25, 0.5]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_pass_at_1_is_avg_at_k(table: list[list[bool]]) -> None:
    assert pass_at_k(table, 1) == pytest.approx(avg_at_k(table), abs=1e-12)


@pytest.mark.parametrize(
    ("table", "k"), [([], 1), ([[]], 1), ([[True]], 2), ([[True, False], [True]], 2), ([[True]], 0)]
)
def test_impossible_tables_are_refused(table: list[list[bool]], k: int) -> None:
    with pytest.raises(ValueError, match="k is|no prompts"):
        pass_at_k(table, k)


def test_wilson_interval_solves_the_equation_that_defines_it() -> None:
    for successes, total in ((1, 10), (7, 10), (50, 200), (199, 200)):
        share = successes / total
        for bound in wilson_interval(successes, total, 0.95):
            distance = abs(share - bound) / math.sqrt(bound * (1 - bound) / total)
            assert distance == pytest.approx(1.959964, abs=1e-5)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.9])
def test_wilson_interval_holds_the_true_share_about_as_often_as_it_says(chance: float) -> None:
    total = 40
    covered = 0.0
    for successes in range(total + 1):
        low, high = wilson_interval(successes, total, 0.9)
        if low <= chance <= high:
            covered += math.comb(total, successes) * chance**successes * (1 - chance) ** (total - successes)
    assert 0.85 <= covered <= 0.97


@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_interval_holds_the_observed_share_and_mirrors(trials: tuple[int, int]) -> None:
    successes, total = trials
    low, high = wilson_interval(successes, total)
    assert 0.0 <= low <= successes / total <= high <= 1.0
    assert low < high
    mirrored = wilson_interval(total - successes, total)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(("successes", "total", "confidence"), [(1, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_interval_refuses_what_is_no_share(successes: int, total: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="need 0 <= successes"):
        wilson_interval(successes, total, confidence)


def test_majority_by_hand() -> None:
    assert majority(["4", "4", "5"], [True, True, False]) == 1.0
    assert majority(["4", "5", "5"], [True, False, False]) == 0.0
    assert majority(["4", "5", "6"], [True, False, False]) == pytest.approx(1 / 3)  # whichever is taken
    assert majority(["4", "5", "5", "4"], [True, False, False, True]) == 0.5
    assert majority(["1/2", "0.5", "3", "3"], [True, True, False, False]) == 0.5  # one answer, written in two ways
    assert majority([None, None, None, "4"], [False, False, False, True]) == 1.0  # who gives none has no vote
    assert majority([None, None], [False, False]) == 0.0
    assert majority([None, "7", "7"], [True, False, False]) == 0.0  # right, though its answer is not found


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.just(None)), min_size=1, max_size=9), st.data())
def test_majority_is_what_a_draw_among_the_most_frequent_gives(
    rows: list[tuple[str, None]], data: st.DataObject
) -> None:
    answers = [answer for answer, _ in rows]
    gold = data.draw(st.sampled_from(["a", "b", "e"]))
    most = [one for one in set(answers) if answers.count(one) == max(map(answers.count, answers))]
    expected = sum(one == gold for one in most) / len(most)
    assert majority(answers, [answer == gold for answer in answers]) == pytest.approx(expected)
    order = data.draw(st.permutations(range(len(answers))))
    assert majority([answers[i] for i in order], [answers[i] == gold for i in order]) == pytest.approx(expected)


def test_an_interval_of_a_mean_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = mean_interval(rng.beta(2.0, 3.0, 60).tolist())
        held += low <= 0.4 <= high
    assert 0.90 <= held / 200 <= 0.99


def test_an_interval_of_a_mean_is_the_same_each_time_and_narrows() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 8
    low, high = mean_interval(values)
    assert (low, high) == mean_interval(values) and low < sum(values) / len(values) < high
    narrow = mean_interval(values * 16)
    assert narrow[1] - narrow[0] < 0.3 * (high - low)
    assert mean_interval([1.0] * 40) == wilson_interval(40, 40) and mean_interval([0.0]) == wilson_interval(0, 1)
    assert mean_interval([0.5] * 2) == wilson_interval(1, 2)
    with pytest.raises(ValueError, match="no prompts"):
        mean_interval([])
