"""Scores against brute force: every way to draw, every outcome of every trial."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.evaluation.scores import avg_at_k, pass_at_k, wilson_interval


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=7), min_size=1, max_size=4), st.integers(1, 4))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(table: list[list[bool]], k: int) -> None:
    shares = []
    for row in table:
        draws = list(itertools.combinations(row, k))
        shares.append(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at_k(table, k) == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k([[True, False, False, False]], 2) == pytest.approx(0.5)
    assert pass_at_k([[True, False], [False, False]], 1) == pytest.approx(0.25)
    assert pass_at_k([[False] * 400 + [True] * 600], 400) == 1.0  # factorials far beyond a float


def test_avg_at_k_gives_every_prompt_the_same_weight() -> None:
    assert avg_at_k([[True, True, True, True], [False]]) == 0.5
    assert avg_at_k([[True, False, False, False], [True, True, False, False]]) == pytest.approx(0.375)


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
