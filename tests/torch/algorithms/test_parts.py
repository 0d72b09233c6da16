"""Every part of an objective against plain Python in float64: values, gradients, masks, and every way to cut a batch.

Takes 10 s. It would catch a bound that acts on the wrong sign of the advantage, a weight that is differentiated, a mean
that depends on the micro-batches, and a value outside the mask that reaches the loss.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from gspo_hpc.algorithms.loss import policy_loss
from gspo_hpc.algorithms.objective import BatchSize, Objective, resolve
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.plugins import algorithms
from gspo_hpc.ops.batch import PackedBatch
from tests.torch.algorithms import test_loss
from tests.torch.algorithms.test_loss import Case, cases, fixed, flat, packed

PRESETS = {name: resolve(from_dict({"algorithm": {"name": name}}).algorithm) for name in algorithms()}
NARROW = {"clip_low": 0.02, "clip_high": 0.03}
TOKEN = Objective("token", 0.02, 0.03, "sequence", True, 0.0)
SEQUENCE = Objective("sequence", 0.02, 0.03, "sequence", True, 0.0)
PARTS = {
    "dual": replace(TOKEN, dual_clip=1.05),
    "dual-sequence": replace(SEQUENCE, dual_clip=1.04),
    "weight": replace(TOKEN, trust_region="weight", aggregation="token"),
    "weight-sequence": replace(SEQUENCE, trust_region="weight"),
    "mask": replace(TOKEN, trust_region="mask", clip_low=0.002, clip_high=0.001, weight_max=1.02),
    "gate": replace(TOKEN, trust_region="gate"),
    "gate-sequence_token": replace(TOKEN, ratio="sequence_token", trust_region="gate"),
    "geometric": replace(TOKEN, trust_region="geometric"),
    "prompt": replace(TOKEN, aggregation="prompt", kl_beta=0.2),
    "fixed_length": replace(TOKEN, aggregation="fixed_length"),
    "truncated": replace(TOKEN, correction_kind="truncated", correction_high=1.005),
    "truncated-sequence": replace(SEQUENCE, correction_kind="truncated", correction_high=1.005),
    "masked": replace(TOKEN, correction_kind="masked", correction_low=0.97, correction_high=1.02),
    "rejection": replace(TOKEN, correction_kind="rejection", correction_low=0.97, correction_high=1.02),
    "rejection-sequence": replace(SEQUENCE, correction_kind="rejection", correction_low=0.97, correction_high=1.02),
    "masked-geometric": replace(
        TOKEN, trust_region="geometric", correction_kind="masked", correction_low=0.9, correction_high=1.02
    ),
    "sequence_mask": replace(TOKEN, sequence_mask=0.005),
    "sequence_mask-sequence": replace(SEQUENCE, sequence_mask=0.005),
    **{f"kl-{name}": replace(TOKEN, kl_beta=0.3, kl_estimator=name) for name in ("k1", "k2", "absolute", "unbiased")},
}
OBJECTIVES = PRESETS | PARTS
PROMPTS = (0, 0, 1, 1, 1, 2, 3, 3)  # of the samples of a case


def with_prompts(case: Case, batch: PackedBatch) -> PackedBatch:
    return replace(batch, prompt_tokens=torch.tensor(prompt_tokens(case), dtype=torch.int64))


SPOILT = ("new", "old", "reference", "rollout")


def spoilt(rows: list[list[float]], sample: int, value: float) -> list[list[float]]:
    """The rows with this value in the place of all that a sample has."""
    return [[value] * len(row) if i == sample else row for i, row in enumerate(rows)]


def prompt_tokens(case: Case) -> list[int]:
    lengths = [len(row) * keep for row, keep in zip(case.new, case.included, strict=True)]
    of = PROMPTS[: len(lengths)]
    return [sum(n for n, prompt in zip(lengths, of, strict=True) if prompt == own) for own in of]


def region(o: Objective, r: float, frozen: float, advantage: float, log_r: float, change: float) -> float:
    """The policy term of one ratio: r is differentiated, `frozen` is its value without gradient."""
    if o.trust_region == "clip":
        term = min(r * advantage, min(max(r, 1 - o.clip_low), 1 + o.clip_high) * advantage)
        return -max(term, o.dual_clip * advantage) if o.dual_clip and advantage < 0 else -term
    if o.trust_region == "weight":
        return -min(max(frozen, 1 - o.clip_low), 1 + o.clip_high) * advantage * log_r
    if o.trust_region == "mask":
        dropped = (advantage > 0 and change > o.clip_high) or (advantage < 0 and change < -o.clip_low)
        return 0.0 if dropped else -min(frozen, o.weight_max) * advantage * log_r
    t = o.gate_positive if advantage > 0 else o.gate_negative
    return -4 / t / (1 + math.exp(-t * (r - 1))) * advantage


def weight_of(o: Objective, log_rho: float, mean: float) -> float:
    low, high = o.correction_low, o.correction_high
    rho = math.exp(log_rho)
    if o.correction_kind == "truncated":
        return min(rho, high)
    if o.correction_kind == "masked":
        return rho if low <= rho <= high else 0.0
    return float(low <= math.exp(mean) <= high) if o.correction_kind == "rejection" else 1.0


def kl_of(o: Objective, x: float, ratio: float) -> float:
    k3 = math.exp(x) - 1 - x
    return {"k1": -x, "k2": x * x / 2, "k3": k3, "absolute": abs(x), "unbiased": ratio * k3}[o.kl_estimator]


def expected(case: Case, o: Objective, denominator: float, at: Case | None = None) -> float:
    """The loss sample by sample, token by token; what has no gradient is taken from `at`."""
    at = at or case
    total, of_prompt = 0.0, prompt_tokens(case)
    for i, (new, old, advantage, included) in enumerate(
        zip(case.new, case.old, case.advantages, case.included, strict=True)
    ):
        if not included:
            continue
        n, fixed_new = len(new), at.new[i]
        d, sg = [a - b for a, b in zip(new, old, strict=True)], [a - b for a, b in zip(fixed_new, old, strict=True)]
        gap = [a - b for a, b in zip(old, case.rollout[i], strict=True)]
        mean_gap = sum(gap) / n
        divisor = {"sequence": n, "prompt": of_prompt[i], "token": 1, "fixed_length": 1}[o.aggregation]
        if o.trust_region == "geometric":
            bounded = [min(x, o.clip_high) if advantage > 0 else max(x, -o.clip_low) for x in d]
            value = -math.exp(sum(bounded) / n) * advantage * weight_of(o, mean_gap, mean_gap)
        elif o.ratio == "sequence":
            term = region(o, math.exp(sum(d) / n), math.exp(sum(sg) / n), advantage, sum(d) / n, 0.0)
            value = term * weight_of(o, mean_gap, mean_gap)
        else:
            value = 0.0
            for t in range(n):
                log_r, frozen = d[t], sg[t]
                if o.ratio == "sequence_token":
                    log_r, frozen = sum(sg) / n + new[t] - fixed_new[t], sum(sg) / n
                change = math.exp(fixed_new[t]) - math.exp(old[t])
                term = region(o, math.exp(log_r), math.exp(frozen), advantage, log_r, change)
                value += term * weight_of(o, gap[t], mean_gap) / divisor
        moved = sum(a - b for a, b in zip(case.rollout[i], fixed_new, strict=True)) / n
        if o.sequence_mask and advantage < 0 and moved > o.sequence_mask:
            value = 0.0
        total += value
        if o.kl_beta:
            kls = (kl_of(o, r - a, math.exp(x)) for a, r, x in zip(new, case.reference[i], d, strict=True))
            total += o.kl_beta * sum(kls) / divisor
    return total / denominator


@pytest.mark.parametrize("name", OBJECTIVES)
@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_values_equal_plain_python(name: str, case: Case) -> None:
    objective = OBJECTIVES[name]
    result = policy_loss(flat(case.new), with_prompts(case, packed(case)), objective, denominator=3.0)
    assert result.loss.item() == pytest.approx(expected(case, objective, 3.0), rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_equal_finite_differences(name: str) -> None:
    objective = OBJECTIVES[name]
    case = replace(fixed(5), included=[True, True, False, True, True, True])
    point = flat(case.new).requires_grad_()
    loss = policy_loss(point, with_prompts(case, packed(case)), objective, denominator=3.0).loss
    (gradient,) = torch.autograd.grad(loss, point)
    assert gradient.abs().max() > 1e-3
    places = [(s, t) for s, row in enumerate(case.new) for t in range(len(row))]
    for place, (s, t) in enumerate(places):
        ends = []
        for sign in (1e-6, -1e-6):
            moved = [row[:] for row in case.new]
            moved[s][t] += sign
            ends.append(expected(replace(case, new=moved), objective, 3.0, at=case))
        slope = (ends[0] - ends[1]) / 2e-6
        assert gradient[place].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), (s, t)


# But for means over prompts, whose micro-batches carry the tokens of prompts: they are tested below.
@pytest.mark.parametrize("name", [name for name, objective in PARTS.items() if objective.aggregation != "prompt"])
def test_masks_and_empty_batches(name: str) -> None:
    """As for the objectives of test_loss.py: nothing outside the mask counts, bit for bit."""
    objective = PARTS[name]
    for bad in test_loss.BAD:
        test_loss.test_what_is_masked_does_not_matter_bit_for_bit(objective, bad)
        test_loss.test_all_masked_is_zero_with_zero_gradient(objective, bad)
    test_loss.test_an_empty_micro_batch_is_zero(objective)
    test_loss.test_context_parallel_ranks_together_have_the_whole_gradient(objective)


@pytest.mark.parametrize("bad", test_loss.BAD)
def test_masks_of_means_over_prompts(bad: float) -> None:
    """Nothing of a sample that does not count matters, bit for bit."""
    case = replace(fixed(5), included=[True, True, False, True, True, True])
    found = []
    for chosen in (case, *(replace(case, **{name: spoilt(getattr(case, name), 2, bad)}) for name in SPOILT)):
        point = flat(chosen.new).requires_grad_()
        loss = policy_loss(point, with_prompts(chosen, packed(chosen)), PARTS["prompt"], denominator=3.0).loss
        (gradient,) = torch.autograd.grad(loss, point)
        found.append(torch.cat((loss.detach()[None], gradient)))
    assert all(torch.equal(one, found[0]) for one in found) and found[0].any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up(name: str) -> None:
    """The samples of a batch in one micro-batch, or each in its own, in another order."""
    objective, case = OBJECTIVES[name], fixed(3)
    of_prompt = prompt_tokens(case)

    def part(chosen: list[int]) -> torch.Tensor:
        rows = [[getattr(case, f)[i] for i in chosen] for f in ("new", "old", "reference", "rollout")]
        piece = Case(*rows, [case.advantages[i] for i in chosen], [case.included[i] for i in chosen])
        batch = replace(packed(piece), prompt_tokens=torch.tensor([of_prompt[i] for i in chosen]))
        point = flat(piece.new).requires_grad_()
        loss = policy_loss(point, batch, objective, denominator=6.0).loss
        (gradient,) = torch.autograd.grad(loss, point)
        pieces = zip(chosen, gradient.split([len(row) for row in piece.new]), strict=True)
        ordered = torch.cat([values for _, values in sorted(pieces, key=lambda pair: pair[0])])
        return torch.cat((loss.detach()[None], ordered))

    whole = part(list(range(6)))
    torch.testing.assert_close(part([3, 1, 5, 0, 4, 2]), whole)
    alone = [part([i]) for i in range(6)]
    torch.testing.assert_close(sum(one[0] for one in alone), whole[0])
    torch.testing.assert_close(torch.cat([one[1:] for one in alone]), whole[1:])


@pytest.mark.parametrize("name", PRESETS)
def test_an_overflowing_ratio_leaves_a_finite_gradient_or_shows(name: str) -> None:
    """Log-probs that moved by 200 leave no NaN where a bound holds, although infinity times zero is one."""
    case = Case([[-1.0, -1.0]], [[-200.0, -300.0]], [[0.0, 0.0]], [[-200.0, -300.0]], [1.0], [True])
    point = flat(case.new, torch.float32).requires_grad_()
    loss = policy_loss(point, packed(case, torch.float32), PRESETS[name], denominator=1.0).loss
    assert math.isfinite(loss.item()) and torch.isfinite(torch.autograd.grad(loss, point)[0]).all()


@pytest.mark.parametrize(
    ("aggregation", "size"), [("sequence", 7), ("token", 50), ("prompt", 3), ("fixed_length", 7 * 16)]
)
def test_what_the_sum_is_divided_by(aggregation: str, size: int) -> None:
    objective = replace(TOKEN, aggregation=aggregation)
    assert objective.denominator(BatchSize(7, 50, 3, 16)) == size


def test_the_gap_is_measured_where_it_can_be_known() -> None:
    """In bypass the old log-probs are the engine's: the weights that sampled are known in the first update only."""
    case = fixed(4)
    batch = packed(replace(case, old=case.rollout))
    plain = policy_loss(flat(case.new), packed(replace(case, old=case.new)), TOKEN, denominator=1.0).sums
    bypass = replace(TOKEN, correction_kind="bypass")
    first = policy_loss(flat(case.new), batch, bypass, denominator=1.0, sampled_by_this=True).sums
    later = policy_loss(flat(case.new), batch, bypass, denominator=1.0).sums
    for name in (name for name in plain if name.startswith("logprob_gap")):
        assert torch.equal(first[name], plain[name]) and not later[name].any(), name
    assert first["logprob_gap"][0] > 0


def test_an_entropy_bonus_is_averaged_as_the_other_terms() -> None:
    case = replace(fixed(3), included=[True, False, True, True, True, True])
    entropy = [[0.1 * (i + t) for t in range(len(row))] for i, row in enumerate(case.new)]
    for aggregation in ("sequence", "token"):
        plain, bonus = (
            replace(TOKEN, aggregation=aggregation),
            replace(TOKEN, aggregation=aggregation, entropy_coef=0.3),
        )
        values = flat(entropy).requires_grad_()
        without = policy_loss(flat(case.new), packed(case), plain, denominator=2.0).loss
        loss = policy_loss(flat(case.new), packed(case), bonus, denominator=2.0, entropy=values).loss
        sums = [sum(row) / (len(row) if aggregation == "sequence" else 1) for row in entropy]
        wanted = 0.3 * sum(s for s, keep in zip(sums, case.included, strict=True) if keep) / 2.0
        assert (without - loss).item() == pytest.approx(wanted)
        (gradient,) = torch.autograd.grad(loss, values)
        assert ((gradient < 0) == packed(case).loss_mask).all()


def test_what_a_correction_changed_is_counted() -> None:
    case = fixed(5)
    gaps = [[a - b for a, b in zip(o, r, strict=True)] for o, r in zip(case.old, case.rollout, strict=True)]
    flat_gaps = [g for row in gaps for g in row]
    for name, bad in (
        ("truncated", sum(math.exp(g) > 1.005 for g in flat_gaps)),
        ("masked", sum(not 0.97 <= math.exp(g) <= 1.02 for g in flat_gaps)),
        ("rejection-sequence", sum(not 0.97 <= math.exp(sum(g) / len(g)) <= 1.02 for g in gaps)),
    ):
        found = policy_loss(flat(case.new), packed(case), PARTS[name], denominator=1.0).sums["correction_fraction"]
        assert bad and found.tolist() == [bad, 6 if "sequence" in name else len(flat_gaps)], name
