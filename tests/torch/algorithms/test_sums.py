"""Sums over samples and over buckets of positions: the ways of a CPU and of a GPU against plain Python.

Takes 5 s. It would catch a bucket that begins one token too early, an empty sample that shifts those behind it, a token
that does not count and is counted, and positions with gaps that are taken for a row without.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_hpc.algorithms.terms.aggregation import Samples
from gspo_hpc.algorithms.terms.gap_buckets import CACHED, NAMES, POSITIONS, sums_by_bucket


@dataclass(frozen=True)
class Rows:
    """Per sample: the position before each token, the tokens that count, and what was cached; some have no token."""

    before: list[list[int]]
    counts: list[list[bool]]
    cached: list[int]

    def samples(self, on_cpu: bool) -> Samples:
        """Return the samples; with `on_cpu` false they add as on a GPU."""
        ids = torch.tensor([i for i, row in enumerate(self.before) for _ in row], dtype=torch.int64)
        mask = torch.tensor([one for row in self.counts for one in row], dtype=torch.bool)
        made = Samples(ids, len(self.before), mask, torch.float64, lambda x: x)
        if not on_cpu:
            made.runs, made.all_count = None, False
        return made

    def sizes(self) -> Tensor:
        """Return a different power of 2 for each of up to 50 tokens, so that no two sums are equal; else 0."""
        flat = [one for row in self.counts for one in row]
        return torch.tensor([float(one) * 2.0**-i for i, one in enumerate(flat)], dtype=torch.float64)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    before = []
    edges = st.sampled_from([0, 100, *(bound + step for bound in POSITIONS for step in (-2, -1, 0))])
    for _ in range(draw(st.integers(1, 6))):
        length, first, gap = draw(st.integers(0, 8)), draw(edges), draw(st.sampled_from([0, 0, 0, 300, 20_000]))
        jump = draw(st.integers(0, 8))
        before.append([first + i + (gap if i >= jump else 0) for i in range(length)])
    every = draw(st.booleans())
    counts = [[every or draw(st.booleans()) for _ in row] for row in before]
    cached = [draw(st.sampled_from([0, 1, 256, 257, 2048, 2049])) for _ in before]
    return Rows(before, counts, cached)


def expected(given_rows: Rows, known: bool) -> list[list[float]]:
    table = [[0.0, 0.0] for _ in NAMES]
    sizes = iter(given_rows.sizes().tolist())
    for row, counts, cached in zip(given_rows.before, given_rows.counts, given_rows.cached, strict=True):
        for before, one in zip(row, counts, strict=True):
            size = next(sizes)
            if one:
                of_cache = sum((cached if known else 0) > bound for bound in CACHED)
                of_position = len(CACHED) + 1 + sum(before + 1 > bound for bound in POSITIONS)
                for place in (of_cache, of_position):
                    table[place][0] += size
                    table[place][1] += 1.0
    return table


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("known", [True, False])
@given(given_rows=rows())
@settings(max_examples=150, deadline=None)
def test_gaps_by_place_equal_plain_python(on_cpu: bool, known: bool, given_rows: Rows) -> None:
    before = torch.tensor([one for row in given_rows.before for one in row], dtype=torch.int64)
    order = torch.arange(len(before)).flip(0)  # positions stand elsewhere in the micro-batch than the tokens
    cached = torch.tensor(given_rows.cached) if known else None
    table = sums_by_bucket(given_rows.sizes(), given_rows.samples(on_cpu), cached, before[order], order)
    assert table.tolist() == expected(given_rows, known)


@given(given_rows=rows())
@settings(max_examples=100, deadline=None)
def test_sums_of_samples_are_the_same_bits_in_both_ways(given_rows: Rows) -> None:
    fast, slow = given_rows.samples(True), given_rows.samples(False)
    assert fast.all_count == (bool(fast.mask.numel()) and bool(fast.mask.all()))
    values = torch.rand(len(fast.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5
    ends = torch.tensor([len(row) for row in given_rows.before]).cumsum(0).tolist()
    found = []
    for way in (fast, slow):
        point = values.clone().requires_grad_()
        sums = way.sum(point)
        upstream = torch.arange(1.0, len(sums) + 1.0, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(sums, point, upstream)
        assert torch.equal(gradient, upstream[way.ids]) and torch.equal(way.at_tokens(upstream), upstream[way.ids])
        assert way.here.tolist() == [sum(row) for row in given_rows.counts]
        found.append(sums.detach())
    assert torch.equal(*found)
    plain = [sum(values[end - len(row) : end].tolist()) for row, end in zip(given_rows.before, ends, strict=True)]
    assert found[0].tolist() == pytest.approx(plain, rel=1e-12)
