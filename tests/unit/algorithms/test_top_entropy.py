"""The threshold of the highest entropies against a sort of all of them, however they lie on ranks.

It would catch a k-th value that is one off, a share that rounding moves to the next token (0.1 of 30), ties that are
dropped, and an order of bits that is not that of the numbers. Takes a second.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.algorithms.terms.top_entropy import Counts, Floats, reached, thresholds

entropy = st.one_of(
    st.floats(0.0, 12.0, width=32), st.sampled_from([0.0, -0.0, 0.5, 1.0]), st.floats(0.0, 2.0**-140, width=32)
)
batches = st.lists(st.lists(entropy, max_size=40), min_size=1, max_size=3)


def alone(entropies: list[Floats], share: float) -> list[np.float32]:
    return thresholds(entropies, share, lambda counts: counts)


def adding(ranks: int) -> Callable[[Counts], Counts]:
    """Return a sum over threads, which all call it."""
    barrier, lock, parts = threading.Barrier(ranks), threading.Lock(), list[Counts]()

    def add(counts: Counts) -> Counts:
        with lock:
            parts.append(counts)
        barrier.wait()
        total: Counts = np.sum(parts, axis=0)
        if barrier.wait() == 0:
            parts.clear()
        barrier.wait()
        return total

    return add


@given(batches, st.sampled_from([0.01, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9]), st.integers(1, 4), st.randoms())
def test_it_is_the_value_at_its_place_among_all_sorted(made, share, ranks, chance) -> None:  # type: ignore[no-untyped-def]
    whole = [np.array(values, np.float32) for values in made]
    places = [np.array([chance.randrange(ranks) for _ in values], int) for values in whole]
    parts = [[values[place == rank] for values, place in zip(whole, places, strict=True)] for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        add = adding(ranks)
        found = list(pool.map(lambda mine: thresholds(mine, share, add), parts))
    for row, values in enumerate(whole):
        k = math.ceil(Fraction(str(share)) * len(values))
        expected = np.sort(values)[::-1][k - 1] if k else np.inf
        assert {float(one[row]) for one in found} == {abs(float(expected))}
        chosen = sum(int(reached(mine[row], found[0][row]).sum()) for mine in parts)
        assert chosen == (values >= expected).sum() >= k


def test_a_share_is_a_decimal_number() -> None:
    """0.1 * 30 is 3.0000000000000004, and four tokens would be chosen."""
    values = np.arange(30, dtype=np.float32)
    assert reached(values, alone([values], 0.1)[0]).sum() == 3


def test_what_is_no_entropy_counts_as_none() -> None:
    values = np.array([np.nan, -1e-7, 2.0, 1.0], np.float32)
    (threshold,) = alone([values], 0.5)
    assert threshold == 1.0 and reached(values, threshold).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("share", [0.2, 0.999])
def test_a_batch_without_tokens_has_none(share: float) -> None:
    found = alone([np.zeros(0, np.float32), np.ones(1, np.float32)], share)
    assert found == [np.inf, 1.0]
