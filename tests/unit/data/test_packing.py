"""Packing: every sample once, budgets kept, equal counts, near the lower bound, fast."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_hpc.data import best_fit as filling
from gspo_hpc.data import packing
from gspo_hpc.data.best_fit import best_fit
from gspo_hpc.data.packing import Sample, evenness, token_count
from tests.unit.data import plain_packing

LARGEST = 40 + 64  # of the prompts and responses that `sample_lists` draws


def pack(samples: list[Sample], *, dp_size: int, **how: Any) -> list[list[list[Sample]]]:
    """The micro-batches of all ranks, each as it packs them; all agree on who computes what."""
    found = [packing.pack(samples, dp_size=dp_size, rank=rank, **how) for rank in range(dp_size)]
    for one in found:
        assert np.array_equal(one.samples, found[0].samples) and np.array_equal(one.ranks, found[0].ranks)
        own = one.samples[one.ranks == one.rank]
        assert sorted(s for batch in one.batches for s in batch) == [Sample(*row) for row in own.tolist()]
    return [one.batches for one in found]


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Groups with gaps in slots and indices: excluded completions are not packed."""
    slots = draw(st.lists(st.integers(0, 50), unique=True, max_size=8))
    made = []
    for slot in slots:
        prompt_len = draw(st.integers(1, 40))
        for index in draw(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=8)):
            made.append(Sample(slot, index, prompt_len, draw(st.integers(1, 64))))
    return draw(st.permutations(made))


def computed_tokens(batch: list[Sample], share_prompts: bool) -> int:
    """The cost by counting position after position, independent of token_count."""
    cells: set[tuple[tuple[str | int, ...], int]] = set()
    for s in batch:
        owner: tuple[str | int, ...] = ("prompt", s.slot) if share_prompts else ("prompt", s.slot, s.index)
        cells.update((owner, i) for i in range(s.prompt_len))
        cells.update((("response", s.slot, s.index), i) for i in range(s.response_len - 1))
    return len(cells)


def check(samples: list[Sample], packed: list[list[list[Sample]]], dp_size: int) -> None:
    """What holds for both kinds of micro-batches."""
    assert len(packed) == dp_size
    batches = [batch for rank in packed for batch in rank]
    assert Counter(s for batch in batches for s in batch) == Counter(samples)
    assert len({len(rank) for rank in packed}) == 1
    if len(samples) >= len(batches):
        assert all(batches)
    assert all(batch == sorted(batch) for batch in batches)  # the completions of a group are adjacent


@given(sample_lists(), st.integers(1, 5), st.integers(0, 300), st.booleans(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_token_budget(samples: list[Sample], dp_size: int, extra: int, share: bool, multiple: int) -> None:
    budget = max((s.prompt_len + s.response_len - 1 for s in samples), default=1) + extra
    how = {"micro_batch_size": None, "micro_batch_tokens": budget, "share_prompts": share, "multiple": multiple}
    packed = pack(samples, dp_size=dp_size, **how)
    check(samples, packed, dp_size)
    assert len(packed[0]) % multiple == 0
    for rank in packed:
        for batch in rank:
            assert computed_tokens(batch, share) == token_count(batch, share) <= budget
    assert packed == pack(sorted(samples), dp_size=dp_size, **how)


@given(sample_lists(), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_fixed_size(samples: list[Sample], dp_size: int, size: int, share: bool, multiple: int) -> None:
    how = {"micro_batch_size": size, "micro_batch_tokens": None, "share_prompts": share, "multiple": multiple}
    packed = pack(samples, dp_size=dp_size, **how)
    check(samples, packed, dp_size)
    sizes = [len(batch) for rank in packed for batch in rank]
    assert len(packed[0]) == -(-len(samples) // (size * dp_size * multiple)) * multiple
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    if len(samples) % (size * dp_size * multiple) == 0:
        assert set(sizes) <= {size}


def test_fixed_size_takes_consecutive_completions() -> None:
    samples = [Sample(slot, index, 5, 7) for slot in range(4) for index in range(4)]
    packed = pack(samples, dp_size=2, micro_batch_size=4, micro_batch_tokens=None, share_prompts=True)
    for rank in packed:
        for batch in rank:
            assert len({s.slot for s in batch}) == 1 and [s.index for s in batch] == [0, 1, 2, 3]


def test_a_group_that_fits_stays_together() -> None:
    rng = random.Random(0)
    samples = [Sample(slot, index, 60, rng.randint(10, 24)) for slot in range(16) for index in range(8)]
    for dp_size in (1, 2, 4):
        packed = pack(samples, dp_size=dp_size, micro_batch_size=None, micro_batch_tokens=512, share_prompts=True)
        homes = Counter(s.slot for rank in packed for batch in rank for s in {t.slot: t for t in batch}.values())
        assert set(homes.values()) == {1}, dp_size


def test_a_group_over_the_budget_pays_for_its_prompt_again() -> None:
    samples = [Sample(0, index, 60, 41) for index in range(8)]  # 60 + 8 * 40 = 380 tokens
    (rank,) = pack(samples, dp_size=1, micro_batch_size=None, micro_batch_tokens=220, share_prompts=True)
    assert [token_count(batch, True) for batch in rank] == [220, 220]
    (rank,) = pack(samples, dp_size=1, micro_batch_size=None, micro_batch_tokens=219, share_prompts=True)
    assert [token_count(batch, True) for batch in rank] == [180, 180, 140]


def test_a_sample_over_the_budget_is_told_with_its_numbers() -> None:
    samples = [Sample(0, 0, 10, 10), Sample(3, 5, 100, 29)]
    with pytest.raises(ValueError) as error:
        pack(samples, dp_size=1, micro_batch_size=None, micro_batch_tokens=127, share_prompts=True)
    for part in ("micro_batch_tokens (127)", "completion 5 of prompt 3", "100 prompt + 29 response - 1 = 128"):
        assert part in str(error.value)
    (rank,) = pack(samples, dp_size=1, micro_batch_size=None, micro_batch_tokens=128, share_prompts=True)
    assert len(rank) == 2


def test_no_samples_no_micro_batches() -> None:
    assert pack([], dp_size=3, micro_batch_size=4, micro_batch_tokens=None, share_prompts=True) == [[], [], []]
    assert pack([], dp_size=2, micro_batch_size=None, micro_batch_tokens=9, share_prompts=True) == [[], []]


def test_fewer_samples_than_ranks() -> None:
    samples = [Sample(0, index, 4, 5) for index in range(3)]
    for arguments in ({"micro_batch_tokens": 64}, {"micro_batch_size": 2}):
        sizes = {"micro_batch_tokens": None, "micro_batch_size": None} | arguments
        packed = pack(samples, dp_size=4, share_prompts=True, **sizes)
        assert [len(rank) for rank in packed] == [1, 1, 1, 1]
        if "micro_batch_size" in arguments:
            assert sorted(len(rank[0]) for rank in packed) == [0, 1, 1, 1]


def test_a_rank_of_large_samples_gets_a_small_one_instead_of_an_empty_micro_batch() -> None:
    samples = [Sample(i, 0, 1, length) for i, length in enumerate((30, 3, 64, 30, 2))]
    packed = pack(samples, dp_size=2, micro_batch_size=None, micro_batch_tokens=64, share_prompts=False)
    check(samples, packed, 2)
    assert [len(rank) for rank in packed] == [2, 2]


def test_near_the_lower_bound_of_micro_batches() -> None:
    rng = random.Random(1)
    samples = [Sample(i, 0, 1, max(1, min(8192, int(rng.lognormvariate(7.2, 0.8))))) for i in range(1024)]
    budget = 8192
    (rank,) = pack(samples, dp_size=1, micro_batch_size=None, micro_batch_tokens=budget, share_prompts=False)
    bound = -(-sum(s.response_len for s in samples) // budget)
    assert bound <= len(rank) <= bound + 1


@pytest.mark.parametrize("share", [True, False])
def test_balanced_over_many_ranks_and_fast(share: bool) -> None:
    rng = random.Random(2)
    samples = []
    for slot in range(512):
        prompt_len = rng.randint(50, 400)
        typical = rng.lognormvariate(6.5, 0.7)
        for index in range(8):
            response = max(1, min(8192, int(typical * rng.lognormvariate(0, 0.3))))
            samples.append(Sample(slot, index, prompt_len, response))
    how: dict[str, Any] = {"dp_size": 64, "micro_batch_size": None, "micro_batch_tokens": 16384, "share_prompts": share}
    best = 9.0
    for _ in range(3):
        begin = time.process_time()
        packing.pack(samples, rank=5, **how)
        best = min(best, time.process_time() - begin)
    packed = pack(samples, **how)
    loads = [sum(token_count(batch, share) for batch in rank) for rank in packed]
    assert max(loads) <= 1.03 * sum(loads) / len(loads)
    assert len(packed[0]) <= -(-max(loads) // 16384) + 1
    whole = sum(token_count([s for s in samples if s.slot == slot], share) for slot in range(512))
    assert sum(loads) <= 1.02 * whole  # evening out costs next to no repeated prompts
    assert best < 0.1, best


def test_few_long_groups_are_split_to_even_out_ranks() -> None:
    samples = [Sample(slot, index, 20, 500) for slot in range(3) for index in range(8)]
    packed = pack(samples, dp_size=2, micro_batch_size=None, micro_batch_tokens=8192, share_prompts=True)
    loads = [sum(token_count(batch, True) for batch in rank) for rank in packed]
    assert max(loads) <= 1.01 * sum(loads) / 2


@given(sample_lists(), st.integers(1, 5), st.integers(0, 300), st.booleans())
@settings(max_examples=100, deadline=None)
def test_how_even_it_is(samples: list[Sample], dp_size: int, extra: int, share: bool) -> None:
    budget = max((s.prompt_len + s.response_len - 1 for s in samples), default=1) + extra
    packed = pack(samples, dp_size=dp_size, micro_batch_size=None, micro_batch_tokens=budget, share_prompts=share)
    loads = [sum(computed_tokens(batch, share) for batch in rank) for rank in packed]
    found = evenness(max(loads), sum(loads), dp_size, len(packed[0]), budget)
    assert found["packing/micro_batches"] == len(packed[0])
    if samples:
        assert found["packing/imbalance"] == pytest.approx(max(loads) / (sum(loads) / dp_size))
        assert found["packing/fill"] == pytest.approx(sum(loads) / (budget * dp_size * len(packed[0])))
        assert 1.0 <= found["packing/imbalance"] <= dp_size + 1e-9 and 0.0 < found["packing/fill"] <= 1.0
    assert "packing/fill" not in evenness(max(loads), sum(loads), dp_size, len(packed[0]), None)


# A group goes over as a whole, and so takes its prompt along.
MOVED = [Sample(0, 0, 58, 36), Sample(0, 1, 58, 28), Sample(0, 2, 58, 45), Sample(1, 0, 36, 34), Sample(1, 1, 36, 43)]


@given(sample_lists(), st.integers(1, 12), st.integers(0, 300), st.integers(1, 4), st.booleans(), st.booleans())
@example(MOVED, 3, 0, 1, True, False)
@settings(max_examples=200, deadline=None)
def test_all_ranks_at_once_pack_as_one_after_the_other(
    samples: list[Sample], dp_size: int, extra: int, multiple: int, share: bool, at_once: bool
) -> None:
    """Also where there are too few samples for all micro-batches, and by count; best-fit in either way."""
    budget = max((s.prompt_len + s.response_len - 1 for s in samples), default=1) + extra
    for sizes in ((None, budget), (1 + extra % 9, None)):
        how = dict(zip(("micro_batch_size", "micro_batch_tokens"), sizes, strict=True))
        how |= {"share_prompts": share, "multiple": multiple}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(filling, "_SIZES_OF_A_ROUND", 0 if at_once else 10**9)
            assert pack(samples, dp_size=dp_size, **how) == plain_packing.pack(samples, dp_size=dp_size, **how)


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_many_ranks_pack_as_one_after_the_other(spread: float) -> None:
    """With long groups that are split, moves between ranks, and ranks that have to split micro-batches."""
    rng = np.random.default_rng(4)
    typical = np.repeat(rng.lognormal(7, spread, 300), 8)
    lengths = np.clip(typical * rng.lognormal(0, 0.5, 2400), 1, 8192).astype(int)
    samples = [Sample(place // 8, place % 8, 512, length) for place, length in enumerate(lengths.tolist())]
    how: dict[str, Any] = {"dp_size": 96, "micro_batch_size": None, "micro_batch_tokens": 9000, "share_prompts": True}
    plain = plain_packing.pack(samples, **how)
    for rank in (0, 17, 95):
        found = packing.pack(samples, rank=rank, **how)
        assert found.batches == plain[rank]
    homes = {sample: rank for rank, batches in enumerate(plain) for batch in batches for sample in batch}
    assert found.ranks.tolist() == [homes[sample] for sample in samples]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=8), st.integers(30, 60))
@settings(max_examples=200, deadline=None)
def test_best_fit_of_many_lists_is_that_of_each(lists: list[list[int]], room: int) -> None:
    numbers = np.array([n for n, sizes in enumerate(lists) for _ in sizes], np.int64)
    sizes = np.array([size for one in lists for size in one], np.int64)
    rooms = room + np.arange(len(lists))
    found = []
    for round_ in (0, 10**9):  # all at once, and one after the other
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(filling, "_SIZES_OF_A_ROUND", round_)
            found.append(best_fit(numbers, sizes, rooms).tolist())
    assert found[0] == found[1]
    free: dict[tuple[int, int], int] = {}
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        here = {bin_: left for (number, bin_), left in free.items() if number == numbers[place]}
        fits = sorted((left, bin_) for bin_, left in here.items() if left >= sizes[place])
        bin_ = fits[0][1] if fits else len(here)
        assert found[0][place] == bin_
        key = (int(numbers[place]), bin_)
        free[key] = free.get(key, int(rooms[numbers[place]])) - int(sizes[place])


def test_some_slots_of_an_assignment() -> None:
    samples = [Sample(slot, index, 5, 7) for slot in range(4) for index in range(3)]
    found = packing.pack(samples, dp_size=2, rank=1, micro_batch_size=6, micro_batch_tokens=None, share_prompts=True)
    kept = found.only({1, 3})
    assert [Sample(*row) for row in kept.samples.tolist()] == [s for s in samples if s.slot in (1, 3)]
    assert kept.ranks.tolist() == found.ranks[np.isin(found.samples[:, 0], (1, 3))].tolist()
    assert kept.batches == [[s for s in batch if s.slot in (1, 3)] for batch in found.batches]
