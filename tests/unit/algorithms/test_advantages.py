"""Advantages of a group: the formula, what leaves it unchanged, and that nothing ever becomes NaN."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gspo_hpc.algorithms.terms.advantages import batch_scale, by_reward, group_advantages

REWARDS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=12)
MASKED = st.lists(st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.booleans()), min_size=1, max_size=12)


def advantages(rewards: list[float], excluded: list[bool] | None = None, normalize: bool = True) -> np.ndarray:
    result = group_advantages(np.array(rewards), np.array(excluded or [False] * len(rewards)), normalize)
    assert result.dtype == np.float32
    assert result.shape == (len(rewards),)
    return result


@given(MASKED, st.booleans())
def test_the_formula_over_the_samples_that_count(group: list[tuple[float, bool]], normalize: bool) -> None:
    rewards, excluded = [reward for reward, _ in group], [out for _, out in group]
    alive = [reward for reward, out in group if not out]
    got = advantages(rewards, excluded, normalize)
    if len(set(alive)) < 2:
        assert (got == 0.0).all()
        return
    mean = statistics.mean(alive)
    scale = statistics.stdev(alive) if normalize else 1.0
    wanted = [0.0 if out else (reward - mean) / scale for reward, out in group]
    assert got == pytest.approx(wanted, abs=1e-6)


@given(REWARDS)
def test_sum_is_zero_and_sample_variance_is_one(rewards: list[float]) -> None:
    assume(len(set(rewards)) > 1)
    got = advantages(rewards).astype(np.float64)
    assert got.sum() == pytest.approx(0.0, abs=1e-5)
    assert got.var(ddof=1) == pytest.approx(1.0, abs=1e-5)


@given(REWARDS, st.integers(-50, 50), st.sampled_from([1e-30, 1e-3, 0.5, 7.0, 1e25]))
def test_shift_and_positive_scale_change_nothing(rewards: list[float], shift: int, scale: float) -> None:
    base = advantages(rewards)
    assert advantages([reward + shift for reward in rewards]) == pytest.approx(base, abs=1e-6)
    assert advantages([reward * scale for reward in rewards]) == pytest.approx(base, abs=1e-6)
    assert advantages([-reward for reward in rewards]) == pytest.approx(-base, abs=1e-6)


@given(REWARDS, st.integers(0, 11), st.sampled_from([float("nan"), float("inf"), -1e300, 5.0]), st.booleans())
def test_an_excluded_sample_is_inert(rewards: list[float], place: int, junk: float, normalize: bool) -> None:
    place = min(place, len(rewards))
    with_it = advantages(
        [*rewards[:place], junk, *rewards[place:]],
        [*[False] * place, True, *[False] * (len(rewards) - place)],
        normalize,
    )
    assert with_it[place] == 0.0
    assert np.delete(with_it, place).tobytes() == advantages(rewards, normalize=normalize).tobytes()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("rewards", "excluded"),
    [
        ([0.1] * 8, [False] * 8),
        ([0.1 + 0.2, 0.3, 0.3], [False] * 3),
        (list(np.float32([0.1 * 3, 0.3, 0.2 + 0.1]).astype(float)), [False] * 3),
        ([1.0, 0.0, 1.0], [True, False, True]),
        ([1.0, 0.0], [True, True]),
        ([0.0, -0.0], [False, False]),
        ([5.0], [False]),
        ([], []),
    ],
)
def test_groups_with_nothing_to_compare_give_exact_zeros(
    rewards: list[float], excluded: list[bool], normalize: bool
) -> None:
    assert (advantages(rewards, excluded, normalize) == 0.0).all()


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.booleans(),
)
def test_any_finite_rewards_give_finite_advantages(rewards: list[float], normalize: bool) -> None:
    assert np.isfinite(advantages(rewards, normalize=normalize)).all()


def test_a_small_difference_that_is_none_of_rounding_counts() -> None:
    assert advantages([1.0, 1.0001]) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)


def test_a_reward_that_is_no_number_and_not_excluded_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="neither refused nor excluded"):
        advantages([float("nan"), 1.0])


@given(MASKED)
def test_leave_one_out_is_the_mean_of_the_others(group: list[tuple[float, bool]]) -> None:
    rewards, excluded = np.array([reward for reward, _ in group]), np.array([out for _, out in group])
    got = group_advantages(rewards, excluded, False, "leave_one_out")
    alive = [reward for reward, out in group if not out]
    for reward, out, value in zip(rewards, excluded, got, strict=True):
        others = (sum(alive) - reward) / (len(alive) - 1) if len(alive) > 1 else reward
        assert value == pytest.approx(0.0 if out or len(set(alive)) < 2 else reward - others, abs=1e-6)
    if len(set(alive)) > 1:
        divided = group_advantages(rewards, excluded, True, "leave_one_out")
        assert divided == pytest.approx(got / np.std(alive, ddof=1), rel=1e-5)


@given(REWARDS, st.integers(-50, 50), st.sampled_from([1e-3, 0.5, 7.0]))
def test_kinds_under_shift_scale_and_permutation(rewards: list[float], shift: int, scale: float) -> None:
    """A shift changes no kind but maxrl, a scale none that divides, and the order of a group none."""
    assume(len(set(rewards)) > 1)
    values, none = np.array(rewards), np.zeros(len(rewards), bool)
    for kind in ("group", "leave_one_out", "batch_std", "reinforce_baseline", "maxrl"):
        base = group_advantages(values, none, False, kind)
        backwards = group_advantages(values[::-1], none, False, kind)[::-1]
        assert backwards == pytest.approx(base, rel=1e-5, abs=1e-6)
        if kind == "maxrl":
            assert group_advantages(values * scale, none, False, kind) == pytest.approx(base, rel=1e-4, abs=1e-6)
            continue
        assert group_advantages(values + shift, none, False, kind) == pytest.approx(base, abs=1e-5)
        divisor, scaled = batch_scale(values, base, none, kind), batch_scale(values * scale, base * scale, none, kind)
        if divisor != 1.0:
            assert base * scale / scaled == pytest.approx(base / divisor, rel=1e-4, abs=1e-6)


def test_maxrl_divides_by_the_mean_and_learns_nothing_without_a_success() -> None:
    none = np.zeros(4, bool)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], none, False, "maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert (group_advantages([-1.0, 0.0, 0.0, 0.0], none, False, "maxrl") == 0.0).all()
    assert (group_advantages([1.0, -1.0, 0.0, 0.0], none, False, "maxrl") == 0.0).all()


def test_deviations_of_a_rollout() -> None:
    rewards, excluded = np.array([1.0, 0.0, 5.0, 3.0, 99.0]), np.array([False] * 4 + [True])
    advantages = np.array([0.5, -0.5, 1.0, -1.0, 0.0])  # of two groups
    assert batch_scale(rewards, advantages, excluded, "batch_std") == pytest.approx(statistics.stdev([1, 0, 5, 3]))
    wanted = statistics.stdev([0.5, -0.5, 1.0, -1.0])
    assert batch_scale(rewards, advantages, excluded, "reinforce_baseline") == pytest.approx(wanted)
    assert batch_scale(rewards, advantages, excluded, "group") == 1.0
    assert batch_scale(np.ones(5), np.zeros(5), excluded, "batch_std") == 1.0
    assert batch_scale(np.zeros(0), np.zeros(0), np.zeros(0, bool), "batch_std") == 1.0


SEVERAL = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.booleans()), min_size=2, max_size=8)


@given(SEVERAL, st.floats(0.125, 8.0), st.floats(-2.0, 2.0), st.integers(-9, 9), st.randoms(use_true_random=False))
def test_every_reward_counts_by_its_weight_alone(
    group: list[tuple[int, int, bool]], scale: float, weight: float, shift: int, chance: random.Random
) -> None:
    """The formula in plain Python agrees; a shift, a scale or the order of one reward changes nothing."""
    rewards = np.array([row[:2] for row in group], dtype=np.float64)
    excluded = [row[2] for row in group]
    alive = [row for row in group if not row[2]]
    wanted = np.zeros(len(group))
    for k, w in enumerate((1.0, weight)):
        values = [row[k] for row in alive]
        if len(set(values)) > 1:
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            wanted += [0.0 if row[2] else w * (row[k] - mean) / deviation for row in group]
    got = by_reward(rewards, (1.0, weight), excluded)
    assert got.dtype == np.float32 and got == pytest.approx(wanted, abs=1e-5)
    moved = rewards * [scale, 1.0] + [0.0, shift]
    assert by_reward(moved, (1.0, weight), excluded) == pytest.approx(wanted, abs=1e-5)
    order = list(range(len(group)))
    chance.shuffle(order)
    again = by_reward(rewards[order], (1.0, weight), np.array(excluded)[order])
    assert again == pytest.approx(got[order], abs=1e-6)


def test_rewards_whose_sums_are_equal_are_told_apart() -> None:
    """The sum of both is 1 for all but the last: one by one, the rarer of the two counts for more."""
    rewards = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    got = by_reward(rewards, (1.0, 1.0), [False] * 4)
    assert got[2] > got[0] == got[1] > got[3]
    assert group_advantages(rewards.sum(1), [False] * 4, True)[:3].tolist() == [0.5, 0.5, 0.5]
