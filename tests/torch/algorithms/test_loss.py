"""The objectives against plain Python, finite differences, and values that must not matter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_hpc.algorithms.loss import MAX_NAMES, SUM_NAMES, policy_loss
from gspo_hpc.algorithms.objective import Objective, Ratio
from gspo_hpc.algorithms.terms import gap_buckets
from gspo_hpc.algorithms.terms.aggregation import Samples
from gspo_hpc.config.algorithm import Aggregation
from gspo_hpc.ops.batch import PackedBatch

LOW, HIGH = 0.02, 0.03


def made(
    ratio: Ratio,
    aggregation: Aggregation = "sequence",
    kl_beta: float = 0.0,
    clip_low: float = LOW,
    clip_high: float = HIGH,
) -> Objective:
    return Objective(ratio, clip_low, clip_high, aggregation, True, kl_beta)


OBJECTIVES = [
    made("sequence"),
    made("sequence_token"),
    made("token"),
    made("token", aggregation="token"),
    made("sequence", kl_beta=0.3),
    made("sequence_token", kl_beta=0.3),
    made("token", kl_beta=0.3),
    made("token", aggregation="token", kl_beta=0.3),
]


@dataclass(frozen=True)
class Case:
    """Per sample: lists of floats, the advantage, and whether it counts."""

    new: list[list[float]]
    old: list[list[float]]
    reference: list[list[float]]
    rollout: list[list[float]]
    advantages: list[float]
    included: list[bool]


def flat(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=dtype)


def packed(case: Case, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """The parts of a batch that a loss looks at are right; the others only have their shapes."""
    lengths = torch.tensor([len(row) for row in case.new], dtype=torch.int64)
    total = int(lengths.sum())
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    nothing = torch.zeros(total, dtype=torch.int64)
    return PackedBatch(
        tokens=nothing,
        positions=nothing,
        segments=torch.zeros(len(lengths), 5, dtype=torch.int32),
        head_index=nothing,
        targets=nothing,
        cu_seqlens=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
        seq_ids=ids,
        loss_mask=torch.tensor(case.included, dtype=torch.bool)[ids],
        advantages=torch.tensor(case.advantages, dtype=dtype),
        rollout_logprobs=flat(case.rollout, dtype),
        old_logprobs=flat(case.old, dtype),
        reference_logprobs=flat(case.reference, dtype),
        keys=tuple((0, i) for i in range(len(lengths))),
    )


def expected(case: Case, objective: Objective, denominator: float) -> float:
    """The formulas in the loss's docstring, sample by sample, token by token."""

    def term(ratio: float, advantage: float) -> float:
        return -min(ratio * advantage, min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high) * advantage)

    total = 0.0
    for new, old, ref, advantage, included in zip(
        case.new, case.old, case.reference, case.advantages, case.included, strict=True
    ):
        if not included:
            continue
        sequence = math.exp(sum(a - b for a, b in zip(new, old, strict=True)) / len(new))
        if objective.ratio == "token":
            terms = [term(math.exp(a - b), advantage) for a, b in zip(new, old, strict=True)]
        else:
            terms = [term(sequence, advantage)] * len(new)
        kls = [math.exp(r - a) - (r - a) - 1 for a, r in zip(new, ref, strict=True)]
        mean = len(new) if objective.aggregation == "sequence" else 1
        total += sum(terms) / mean + objective.kl_beta * sum(kls) / mean
    return total / denominator


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))

    def near(rows: list[list[float]], width: float) -> list[list[float]]:
        return [[x + draw(st.floats(-width, width)) for x in row] for row in rows]

    new = [[draw(st.floats(-5, -0.1)) for _ in range(n)] for n in lengths]
    return Case(
        new=new,
        old=near(new, draw(st.sampled_from([0.01, 0.1, 1.0]))),
        reference=near(new, 1.0),
        rollout=near(new, 0.1),
        advantages=[draw(st.floats(-2, 2)) for _ in lengths],
        included=[draw(st.booleans()) for _ in lengths],
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(case=cases(), denominator=st.floats(0.5, 20))
@settings(max_examples=60, deadline=None)
def test_values_equal_plain_python(objective: Objective, case: Case, denominator: float) -> None:
    result = policy_loss(flat(case.new), packed(case), objective, denominator=denominator)
    assert result.loss.item() == pytest.approx(expected(case, objective, denominator), rel=1e-9, abs=1e-10)
    narrow = policy_loss(flat(case.new, torch.float32), packed(case, torch.float32), objective, denominator=denominator)
    assert narrow.loss.dtype == torch.float32
    assert narrow.loss.item() == pytest.approx(result.loss.item(), rel=1e-4, abs=1e-4)


def fixed(seed: int = 0) -> Case:
    """A case with ratios on all sides of the clip range, at no kink."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 5, 2, 4, 6]

    def rows(scale: float, around: list[list[float]] | None = None) -> list[list[float]]:
        around = around or [[-2.0] * n for n in lengths]
        return [[x + scale * torch.randn((), generator=generator).item() for x in row] for row in around]

    new = rows(1.0)
    return Case(new, rows(0.05, new), rows(0.3, new), rows(0.01, new), [1.5, -0.7, -1.2, 0.8, -2.0, 0.4], [True] * 6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_equal_finite_differences(objective: Objective) -> None:
    """For GSPO-token, whose gradient is that of GSPO by construction, the differences are GSPO's."""
    case = replace(fixed(5), included=[True, True, False, True, True, True])
    point = flat(case.new).requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(point, packed(case), objective, denominator=3.0).loss, point)
    differentiable = replace(objective, ratio="sequence") if objective.ratio == "sequence_token" else objective
    step = 1e-6
    seen = set()
    for i in range(len(point)):
        ends = []
        for sign in (step, -step):
            moved = [row[:] for row in case.new]
            places = [(s, t) for s, row in enumerate(moved) for t in range(len(row))]
            s, t = places[i]
            moved[s][t] += sign
            ends.append(expected(replace(case, new=moved), differentiable, 3.0))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), i
        if case.included[s]:
            seen.add(slope == 0.0)
    assert seen == ({False} if objective.kl_beta else {True, False})  # clipped (the KL term is not) and free


def test_gspo_and_gspo_token_have_one_value_and_one_gradient() -> None:
    case = fixed()
    results = []
    for ratio in ("sequence", "sequence_token"):
        point = flat(case.new).requires_grad_()
        loss = policy_loss(point, packed(case), made(ratio), denominator=6.0).loss
        results.append((loss.detach(), torch.autograd.grad(loss, point)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)
    assert results[0][1].abs().max() > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_old_logprobs_the_ratio_is_one_with_its_gradient(objective: Objective) -> None:
    case = fixed()
    batch = packed(replace(case, old=case.new))
    results = []
    for old in (batch.old_logprobs, None):
        point = flat(case.new).requires_grad_()
        result = policy_loss(point, replace(batch, old_logprobs=old), objective, denominator=6.0)
        assert result.sums["ratio"][0] == result.sums["ratio"][1] and result.maxima["ratio_deviation_max"] == 0
        results.append((result.loss.detach(), torch.autograd.grad(result.loss, point)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().min() > 1e-4


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("bad", BAD)
def test_what_is_masked_does_not_matter_bit_for_bit(objective: Objective, bad: float) -> None:
    included = [True, False, True, True, False, True]
    case = replace(fixed(), included=included)

    def spoil(rows: list[list[float]]) -> list[list[float]]:
        return [row if keep else [bad] * len(row) for row, keep in zip(rows, included, strict=True)]

    spoilt = Case(
        new=spoil(case.new),
        old=spoil(case.old),
        reference=spoil(case.reference),
        rollout=spoil(case.rollout),
        advantages=[a if keep else bad for a, keep in zip(case.advantages, included, strict=True)],
        included=included,
    )
    outcomes = []
    for each in (case, spoilt):
        point = flat(each.new, torch.float32).requires_grad_()
        result = policy_loss(point, packed(each, torch.float32), objective, denominator=4.0)
        (gradient,) = torch.autograd.grad(result.loss, point)
        outcomes.append((result.loss, gradient, *result.sums.values(), *result.maxima.values()))
    assert all(torch.isfinite(x).all() for x in outcomes[1])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    mask = packed(case).loss_mask
    assert (outcomes[0][1][~mask] == 0).all() and (outcomes[0][1][mask] != 0).any()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("bad", [*BAD, -1.0])
def test_all_masked_is_zero_with_zero_gradient(objective: Objective, bad: float) -> None:
    case = replace(fixed(), included=[False] * 6)
    point = torch.full_like(flat(case.new), bad).requires_grad_()
    result = policy_loss(point, packed(case), objective, denominator=1.0)
    (gradient,) = torch.autograd.grad(result.loss, point)
    assert result.loss.item() == 0.0 and (gradient == 0).all()
    assert all((pair == 0).all() for pair in result.sums.values()) and not any(result.maxima.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_micro_batch_is_zero(objective: Objective) -> None:
    empty = packed(Case([], [], [], [], [], []), torch.float32)
    point = torch.zeros(0, requires_grad=True)
    result = policy_loss(point, empty, objective, denominator=1.0)
    assert result.loss.item() == 0.0 and torch.autograd.grad(result.loss, point)[0].shape == (0,)
    assert tuple(result.sums) == SUM_NAMES and tuple(result.maxima) == MAX_NAMES


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "token"])
def test_an_overflowing_ratio_that_is_clipped_is_harmless(ratio: str) -> None:
    case = Case([[0.0, -1.0]], [[-200.0, -300.0]], [[0.0, 0.0]], [[0.0, 0.0]], [1.0], [True])
    point = flat(case.new, torch.float32).requires_grad_()
    loss = policy_loss(point, packed(case, torch.float32), made(ratio), denominator=1.0).loss
    assert loss.item() == pytest.approx(-(1 + HIGH))
    assert (torch.autograd.grad(loss, point)[0] == 0).all()
    worse = replace(case, advantages=[-1.0])  # not clipped: the caller has to notice
    assert policy_loss(point, packed(worse, torch.float32), made(ratio), denominator=1.0).loss.item() == math.inf


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "token"])
def test_a_bad_value_inside_the_mask_shows(ratio: str) -> None:
    case = fixed()
    point = flat(case.new)
    point[4] = math.nan
    assert math.isnan(policy_loss(point, packed(case), made(ratio), denominator=1.0).loss.item())


def test_the_papers_clip_range_is_resolved_for_16_bit_inputs() -> None:
    """1 + 4e-4 and 1 are the same number in bf16."""
    old = [[-0.5, -0.25]]
    inside, outside = [[-0.5 + 3.9e-4, -0.25 + 3.9e-4]], [[-0.5 + 4.1e-4, -0.25 + 4.1e-4]]
    for new, clipped in ((inside, 0.0), (outside, 1.0)):
        batch = packed(Case(new, old, old, old, [1.0], [True]), torch.float32)
        objective = made("sequence", clip_low=3e-4, clip_high=4e-4)
        result = policy_loss(flat(new, torch.float32), batch, objective, denominator=1.0)
        assert result.sums["clip_fraction_high"].tolist() == [clipped, 1.0]
    half = policy_loss(flat(old, torch.bfloat16), batch, made("sequence"), denominator=1.0)
    assert half.loss.dtype == torch.float32


def gap_pairs(gaps: list[float]) -> dict[str, tuple[float, float]]:
    """Sums and counts over the differences of log-probs of trainer and engine."""
    rho = [math.exp(g) for g in gaps]
    return {
        "logprob_gap": (sum(map(abs, gaps)), len(gaps)),
        "logprob_gap_kl": (sum(r - 1 - g for r, g in zip(rho, gaps, strict=True)), len(gaps)),
        "logprob_gap_weight": (sum(rho), len(gaps)),
        "logprob_gap_weight_squared": (sum(r * r for r in rho), len(gaps)),
        "logprob_gap_outside": (sum(not 0.5 <= r <= 2 for r in rho), len(gaps)),
    }


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_metrics_are_sums_and_counts(objective: Objective) -> None:
    included = [True, True, False, True, True, True]
    case = replace(fixed(5), included=included)
    result = policy_loss(flat(case.new), packed(case), objective, denominator=1.0)
    kept = [i for i, keep in enumerate(included) if keep]
    tokens = sum(len(case.new[i]) for i in kept)
    by_token = [
        (a - b, a - r, abs(b - e), case.advantages[i])
        for i in kept
        for a, b, r, e in zip(case.new[i], case.old[i], case.reference[i], case.rollout[i], strict=True)
    ]
    means = {i: sum(a - b for a, b in zip(case.new[i], case.old[i], strict=True)) / len(case.new[i]) for i in kept}
    if objective.ratio == "sequence":
        ratios = [(math.exp(means[i]), case.advantages[i]) for i in kept]
    elif objective.ratio == "sequence_token":
        ratios = [(math.exp(means[i]), case.advantages[i]) for i in kept for _ in case.new[i]]
    else:
        ratios = [(math.exp(d), advantage) for d, _, _, advantage in by_token]
    low = sum(a < 0 and r < 1 - LOW for r, a in ratios)
    high = sum(a > 0 and r > 1 + HIGH for r, a in ratios)
    assert low and high
    expected_sums = {
        "ratio": (sum(r for r, _ in ratios), len(ratios)),
        "clip_fraction": (low + high, len(ratios)),
        "clip_fraction_low": (low, len(ratios)),
        "clip_fraction_high": (high, len(ratios)),
        "approx_kl": (sum(math.exp(d) - 1 - d for d, *_ in by_token), tokens),
        "reference_kl": (
            (sum(math.exp(-d) - 1 + d for _, d, *_ in by_token), tokens) if objective.kl_beta else (0.0, 0.0)
        ),
        **gap_pairs([b - e for i in kept for b, e in zip(case.old[i], case.rollout[i], strict=True)]),
        "correction_fraction": (0.0, 0.0),
        "selected_fraction": (0.0, 0.0),
        "trained_length": (tokens, len(kept)),
        **dict.fromkeys(gap_buckets.NAMES, (0.0, 0.0)),
    }
    for place in ("logprob_gap/cached_0", "logprob_gap/position_256"):
        expected_sums[place] = expected_sums["logprob_gap"]
    assert tuple(expected_sums) == tuple(result.sums) == SUM_NAMES
    for name, pair in expected_sums.items():
        assert result.sums[name].tolist() == pytest.approx(pair, rel=1e-9), name
    assert result.maxima["ratio_deviation_max"].item() == pytest.approx(max(abs(r - 1) for r, _ in ratios))
    assert result.maxima["logprob_gap_max"].item() == pytest.approx(max(g for _, _, g, _ in by_token))
    assert not any(x.requires_grad for x in (*result.sums.values(), *result.maxima.values()))


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_a_divergence_that_is_in_the_reward_is_measured_and_changes_no_loss(ratio: Ratio) -> None:
    """Without it nobody would see a policy run away from its reference, or towards its teacher."""
    case, plain = fixed(3), made(ratio)
    inside = replace(plain, kl_beta=0.3, kl_placement="reward", kl_estimator="k1")
    point, other = (flat(case.new).requires_grad_() for _ in range(2))
    found = policy_loss(point, packed(case), inside, denominator=2.0)
    expected = policy_loss(other, packed(case), plain, denominator=2.0)
    (loss, gradient), (same, its) = [
        (one.loss, *torch.autograd.grad(one.loss, at)) for one, at in ((found, point), (expected, other))
    ]
    assert torch.equal(loss, same) and torch.equal(gradient, its)
    moved = [
        a - r
        for counts, row, others in zip(case.included, case.new, case.reference, strict=True)
        for a, r in zip(row, others, strict=True)
        if counts
    ]
    total, count = found.sums["reference_kl"].tolist()
    assert total == pytest.approx(sum(math.exp(-d) - 1 + d for d in moved)) and count == len(moved)


@pytest.mark.parametrize("objective", [one for one in OBJECTIVES if one.ratio != "sequence"])
def test_tokens_that_were_not_chosen_have_no_policy_term(objective: Objective) -> None:
    """They count in the divisors as before, and have their KL term."""
    case = fixed(2)
    batch = packed(case)
    chosen = torch.arange(len(batch.targets)) % 3 == 0
    point = flat(case.new).requires_grad_()
    found = policy_loss(point, replace(batch, selected=chosen), objective, denominator=6.0)
    total = 0.0
    for sample in range(len(case.new)):  # one token chosen at a time: what it adds to a loss of which none is chosen
        for place in (batch.seq_ids == sample).nonzero()[:, 0].tolist():
            only = torch.arange(len(batch.targets)) == place
            none = policy_loss(flat(case.new), replace(batch, selected=~only & only), objective, denominator=6.0).loss
            one = policy_loss(flat(case.new), replace(batch, selected=only), objective, denominator=6.0).loss
            total += float(one - none) * bool(chosen[place])
    assert float(found.loss) == pytest.approx(total + float(none), rel=1e-9)
    every = policy_loss(flat(case.new), replace(batch, selected=chosen | ~chosen), objective, denominator=6.0).loss
    assert torch.equal(every, policy_loss(flat(case.new), batch, objective, denominator=6.0).loss)
    counted = batch.loss_mask
    assert found.sums["selected_fraction"].tolist() == [(chosen & counted).sum(), counted.sum()]
    if objective.ratio == "token" and not objective.kl_beta:
        (gradient,) = torch.autograd.grad(found.loss, point)
        assert not gradient[~chosen].any() and gradient[chosen & counted].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_splitting_a_batch_changes_neither_sum_nor_gradient(objective: Objective) -> None:
    case = fixed(1)
    point = flat(case.new).requires_grad_()
    whole = policy_loss(point, packed(case), objective, denominator=6.0)
    gradient = torch.autograd.grad(whole.loss, point)[0]
    losses, gradients, sums = 0.0, [], []
    for part in (slice(0, 2), slice(2, 3), slice(3, 6)):
        piece = Case(*(getattr(case, name)[part] for name in Case.__dataclass_fields__))
        point = flat(piece.new).requires_grad_()
        result = policy_loss(point, packed(piece), objective, denominator=6.0)
        losses += result.loss.item()
        gradients.append(torch.autograd.grad(result.loss, point)[0])
        sums.append(result.sums)
    assert losses == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-14)
    for name in SUM_NAMES:
        torch.testing.assert_close(sum(s[name] for s in sums), whole.sums[name])


class _Exchange(torch.autograd.Function):
    """A context-parallel sum on one rank: it adds what the others have, in place, and passes the gradient on."""

    @staticmethod
    def forward(ctx: object, mine: Tensor, others: Tensor) -> Tensor:
        mine.data.add_(others)  # as an all-reduce, of which autograd knows nothing
        return mine

    @staticmethod
    def backward(ctx: object, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_context_parallel_ranks_together_have_the_whole_gradient(objective: Objective) -> None:
    """Two ranks hold the even and the odd tokens of every sample; each hears the other's sums."""
    case = fixed(2)
    point = flat(case.new).requires_grad_()
    batch = packed(case)
    whole = policy_loss(point, batch, objective, denominator=6.0)
    (gradient,) = torch.autograd.grad(whole.loss, point)
    numbers = torch.cat([torch.arange(len(row)) for row in case.new])
    mine = [numbers % 2 == rank for rank in (0, 1)]

    def shard(rank: int, heard: list[Tensor] | None) -> tuple[list[Tensor], Tensor, Tensor, dict[str, Tensor]]:
        said: list[Tensor] = []

        def cp_reduce(x: Tensor) -> Tensor:
            said.append(x.detach().clone())
            return x if heard is None else _Exchange.apply(x, heard[len(said) - 1])

        keep = mine[rank]
        names = ("seq_ids", "loss_mask", "head_index", "targets", "rollout_logprobs", "old_logprobs")
        names += ("reference_logprobs",)
        part = replace(batch, **{name: getattr(batch, name)[keep] for name in names})
        leaf = flat(case.new)[keep].requires_grad_()
        result = policy_loss(leaf, part, objective, denominator=6.0, cp_reduce=cp_reduce)
        return said, result.loss.detach(), torch.autograd.grad(result.loss, leaf)[0], result.sums

    # What each rank says may depend on what it has heard before: repeat until it is settled.
    said = [shard(rank, None)[0] for rank in (0, 1)]
    for _ in range(len(said[0])):
        said = [shard(rank, said[1 - rank])[0] for rank in (0, 1)]
    for rank in (0, 1):
        _, loss, part, sums = shard(rank, said[1 - rank])
        torch.testing.assert_close(loss, whole.loss.detach())
        torch.testing.assert_close(part, gradient[mine[rank]])
        for name in SUM_NAMES:
            torch.testing.assert_close(sums[name], whole.sums[name])


@dataclass(frozen=True)
class Corrected(Objective):
    """Drops tokens whose log-prob moved by more than 0.1 between the engine and the old policy."""

    def correction(self, gap: Tensor, samples: Samples) -> Tensor | None:
        return (gap.abs() <= 0.1).to(gap.dtype)


def test_a_correction_weighs_the_terms_of_tokens() -> None:
    old, rollout = [-1.0, -2.0, -0.5], [-1.05, -2.6, -0.5]  # the second moved too far
    case = Case([[-0.9, -2.1, -0.5]], [old], [old], [rollout], [1.0], [True])
    settings = ("token", 0.9, 9.0, "token", True, 0.0)
    plain = policy_loss(flat(case.new), packed(case), Objective(*settings), denominator=1.0).loss.item()
    corrected = policy_loss(flat(case.new), packed(case), Corrected(*settings), denominator=1.0).loss.item()
    assert plain == pytest.approx(-(math.exp(0.1) + math.exp(-0.1) + 1.0))
    assert corrected == pytest.approx(-(math.exp(0.1) + 1.0))
