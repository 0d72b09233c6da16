"""The gap between engine and trainer: what is too much, what caused it, and what updates say of their rollout.

Costs the import of torch. Catches a limit that improbable tokens decide, a mismatch that is put down to another cause,
and a stale prefix cache that is not noticed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.algorithms.terms import gap_buckets
from gspo_hpc.algorithms.terms.aggregation import Samples
from gspo_hpc.config.derived import gap_limits
from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy import rounding
from gspo_hpc.training.agreement.causes import ProbeAnswers, name_cause, rounding_step, swapped_experts
from gspo_hpc.training.agreement.gap import Gap, excess, measure
from gspo_hpc.training.agreement.watch import GapMismatch, RolloutGapMonitor

HALF = from_dict({"model": {"dtype": "bfloat16"}})
FULL = from_dict({"model": {"dtype": "float32"}})


def test_an_improbable_token_decides_in_float32_only() -> None:
    ours = [np.log(np.array([0.9, 0.8, 1e-5], np.float32))]
    theirs = [ours[0] + np.array([0.001, -0.001, 0.7], np.float32)]
    gap = measure(ours, theirs)
    assert gap.max == pytest.approx(0.7, rel=1e-3) and gap.weighted_max < 0.002 and gap.weighted_mean < 0.002
    assert excess(gap, gap_limits(HALF), None) is None
    assert "max |log-prob difference| 7.0" in str(excess(gap, gap_limits(FULL), None))
    probable = measure(ours, [ours[0] + np.array([0.3, 0.0, 0.0], np.float32)])
    assert "weighted by probability" in str(excess(probable, gap_limits(HALF), None))


def test_what_the_engine_would_sample_counts_also_if_the_trainer_thinks_it_improbable() -> None:
    gap = measure([np.log(np.array([1e-6, 0.5], np.float32))], [np.log(np.array([0.4, 0.5], np.float32))])
    assert gap.weighted_max > 0.4 * 12 and excess(gap, gap_limits(HALF), None) is not None


def test_noise_has_the_size_of_the_coarser_types_rounding() -> None:
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert rounding.size((full, brain), mixture=True) == rounding.size((brain, half), mixture=True) == 2.0**-7
    assert (
        rounding.size((half, half), mixture=True) == 2.0**-10 and rounding.size((half, half), mixture=False) == 2.0**-11
    )


def test_among_improbable_tokens_the_likeliest_does_not_decide_alone() -> None:
    """With their probabilities as weights a probe of rare tokens has the gap of one token, which varies widely."""
    ours = np.log(np.array([1e-5] + [1e-9] * 99, np.float32))
    gap = measure([ours], [ours + np.array([0.2] + [0.02] * 99, np.float32)])
    assert gap.weighted_mean == pytest.approx(0.022, rel=0.01)


def test_a_gap_that_is_not_a_number_is_too_large() -> None:
    gap = measure([np.array([np.nan, -1.0], np.float32)], [np.array([-1.0, -1.0], np.float32)])
    assert gap.max == np.inf and all(excess(gap, gap_limits(config), None) for config in (HALF, FULL))


def test_later_syncs_are_measured_by_the_first() -> None:
    first = Gap(0.1, 0.01, 0.01, 0.003)
    allowed = gap_limits(HALF)
    assert excess(Gap(0.1, 0.01, 0.02, 0.011), allowed, first) is None
    assert "3.00e-03 at the first sync" in str(excess(Gap(0.1, 0.02, 0.02, 0.013), allowed, first))
    assert excess(Gap(0.1, 0.02, 0.02, 0.009), allowed, Gap()) is None  # below the floor
    assert excess(Gap(1e-4, 9e-5, 1e-4, 9e-5), gap_limits(FULL), Gap()) is None  # float32: the limits alone


def test_twice_what_rounding_makes_in_the_trainer_is_allowed_at_any_sync() -> None:
    allowed, rounding = gap_limits(HALF), Gap(9.0, 9.0, 0.2, 0.06)
    for first in (None, Gap(0.1, 0.01, 0.01, 0.003)):
        assert excess(Gap(9.0, 9.0, 0.39, 0.119), allowed, first, rounding) is None
        assert "(allowed 0.12)" in str(excess(Gap(0.1, 0.1, 0.1, 0.121), allowed, first, rounding))
        assert "(allowed 0.4)" in str(excess(Gap(0.1, 0.1, 0.41, 0.001), allowed, first, rounding))
    assert "(allowed 0.05)" in str(excess(Gap(0.1, 0.1, 0.1, 0.051), allowed, None, Gap()))


@pytest.mark.parametrize("size", [np.inf, np.nan])
def test_log_probs_of_a_trainer_that_are_no_numbers_allow_nothing(size: float) -> None:
    """Without experts such a gap is refused; the noise by which a mixture's limits grow must not excuse it."""
    allowed, endless = gap_limits(HALF), Gap(*[size] * 4)
    assert "(allowed 0.25)" in str(excess(Gap(*[np.inf] * 4), allowed, None, endless))
    assert "(allowed 0.05)" in str(excess(Gap(0.1, 0.1, 0.1, 0.051), allowed, None, endless))
    assert excess(Gap(0.1, 0.1, 0.1, 0.049), allowed, None, endless) is None


EXPERTS, LAYERS, TOP_K = 16, 3, 2


@given(st.integers(0, 10_000))
def test_swapped_experts_are_found_by_the_tokens_that_go_to_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((48, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    layer, pair = int(rng.integers(LAYERS)), sorted(rng.choice(EXPERTS, 2, replace=False).tolist())
    gaps = rng.uniform(0.0, 0.01, 48).astype(np.float32)
    touched = np.isin(experts[:, layer], pair).any(axis=1)
    gaps[touched] += rng.uniform(0.2, 0.5, int(touched.sum()))
    found = swapped_experts(gaps, experts)
    assert found is not None and found[0] == layer
    # One of the pair is enough where every token of the other goes to it as well.
    assert set(found[1]) <= set(pair) and np.isin(experts[touched, layer], found[1]).any(axis=1).all()
    # Few tokens may lie by chance as if experts explained their gaps: one in ten thousand draws of 48 does.
    many = np.argsort(rng.random((192, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    assert swapped_experts(rng.uniform(0.0, 0.5, 192).astype(np.float32), many) is None


@given(st.integers(0, 10_000), st.floats(0.5, 30.0))
def test_rounded_logits_lie_on_a_grid_and_others_do_not(seed: int, scale: float) -> None:
    logits = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed)) * scale
    exact, rounded = (
        torch.log_softmax(x.float(), 1).topk(8, dim=1).values.numpy() for x in (logits, logits.bfloat16())
    )
    assert rounding_step(exact) is None
    step = rounding_step(rounded)
    assert step is not None and step <= 2.0 ** (np.floor(np.log2(float(logits.abs().max()))) - 7)


def evidence(probe: float, pairs: float, **more: object) -> ProbeAnswers:
    return ProbeAnswers(np.full(20, probe, np.float32), np.full(12, pairs, np.float32), **more)  # type: ignore[arg-type]


def test_causes_are_told_apart() -> None:
    experts = np.argsort(np.random.default_rng(0).random((24, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    touched = np.isin(experts[:, 1], [2, 5]).any(axis=1)
    of_experts = ProbeAnswers(
        np.full(20, 0.1, np.float32), np.where(touched, 0.2, 0.001).astype(np.float32), experts=experts
    )
    assert "experts 2 and 5 of layer 1" in name_cause(of_experts)
    grid = np.cumsum(np.full((20, 8), -1 / 64), axis=1, dtype=np.float32)
    assert "rounds its logits to 16 bits: they are multiples of 0.015625" in name_cause(evidence(0.01, 0.01, top=grid))
    assert "all tokens differ" in name_cause(evidence(0.5, 0.5, top=grid))  # more than rounding does
    assert "query or key weights" in name_cause(evidence(0.4, 0.01))


def sums(cached_0: float | None, cached_256: float | None, *positions: float) -> dict[str, tuple[float, float]]:
    """Return the sums of an update of 1,000 tokens at each place."""
    found = {"logprob_gap": (1000.0 * (cached_256 if cached_256 is not None else cached_0 or 0.0), 1000.0)}
    for name, mean in zip(gap_buckets.CACHED_NAMES, (cached_0, cached_256), strict=False):
        found |= {} if mean is None else {name: (1000.0 * mean, 1000.0)}
    return found | {n: (1000.0 * m, 1000.0) for n, m in zip(gap_buckets.POSITION_NAMES, positions, strict=False)}


def test_a_stale_cache_shows_behind_cached_prefixes_only() -> None:
    watch = RolloutGapMonitor(HALF)
    watch.judge(sums(0.004, 0.004), 0)
    watch.judge(sums(0.004, 0.009), 4)  # below the floor
    with pytest.raises(
        GapMismatch, match=r"weights of step 8\): .*logprob_gap/cached_256 3\.00e-02.*stale prefix cache"
    ):
        watch.judge(sums(0.004, 0.03), 8)
    with pytest.raises(GapMismatch, match="stale prefix cache"):
        watch.judge(sums(None, 0.03), 8)  # a system prompt is cached for every completion
    watch.judge(sums(0.03, 0.03), 8)  # as large without a cached prefix


def test_other_causes_of_a_rollouts_gap() -> None:
    with pytest.raises(GapMismatch, match="wrong rotary embeddings"):
        RolloutGapMonitor(HALF).judge(sums(0.2, 0.2, 0.01, 0.1, 0.4), 0)
    with pytest.raises(GapMismatch, match=r"router_replay.* raise rollout\.probe_mean_gap"):
        RolloutGapMonitor(HALF).judge(sums(0.2, 0.2, 0.2), 0)
    cold = from_dict({"model": {"dtype": "bfloat16"}, "rollout": {"temperature": 0.2}})
    RolloutGapMonitor(cold).judge(sums(0.2, 0.2), 0)  # logits are five times as far apart
    few = {name: (total / 100, count / 100) for name, (total, count) in sums(9.0, 9.0).items()}
    RolloutGapMonitor(HALF).judge(few, 0)


def samples(ids: list[int], mask: list[bool]) -> Samples:
    counted = torch.tensor(mask)
    return Samples(torch.tensor(ids), max(ids) + 1, counted, torch.float32, lambda x: x)


def test_without_a_prefix_cache_nothing_was_cached() -> None:
    """As with zeros in the place of what is not known, which would be read and counted for nothing."""
    size, of = torch.tensor([0.25, 0.5, 0.0, 1.0]), samples([0, 0, 1, 2], [True, True, False, True])
    before, every = torch.tensor([0, 256, 0, 19_999]), torch.arange(4)
    unknown = gap_buckets.sums_by_bucket(size, of, None, before, every)
    assert torch.equal(unknown, gap_buckets.sums_by_bucket(size, of, torch.zeros(3, dtype=torch.int64), before, every))
    assert unknown[0].tolist() == [1.75, 3.0]


def test_gaps_are_summed_by_place() -> None:
    size, of = torch.tensor([1.0, 2.0, 4.0, 0.0]), samples([0, 1, 2, 3], [True, True, True, False])
    before = torch.tensor([255, 256, 19_999, 0])
    table = gap_buckets.sums_by_bucket(size, of, torch.tensor([0, 256, 257, 0]), before, torch.arange(4))
    found = {name: tuple(row) for name, row in zip(gap_buckets.NAMES, table.tolist(), strict=True) if row[1]}
    assert found == {
        "logprob_gap/cached_0": (1.0, 1.0),
        "logprob_gap/cached_256": (2.0, 1.0),
        "logprob_gap/cached_2048": (4.0, 1.0),
        "logprob_gap/position_256": (1.0, 1.0),
        "logprob_gap/position_1024": (2.0, 1.0),
        "logprob_gap/position_more": (4.0, 1.0),
    }
