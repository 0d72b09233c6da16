"""The loss of one packed micro-batch: the terms of an objective, composed.

Shapes: R response tokens, S samples (completions). Unless the objective replaces a term, every ratio r gives the term
-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A the advantage of its sample. Terms of tokens are averaged over
their sequence (aggregation "sequence"), divided by the tokens of all samples of their prompt ("prompt"), or only
summed ("token", "fixed_length"). With kl_beta > 0 each token adds kl_beta * k3(log pi_ref - log pi), or another
estimate, averaged or summed just as above, unless the KL term is in the reward; with
entropy_coef > 0 each token takes off entropy_coef times its entropy, likewise. The loss is the sum over the samples
divided by `denominator`, which Objective.denominator gives.

Ratios are computed in fp32 (float64 stays float64): near 1 a bf16 number cannot tell a clip range of 3e-4. Places
outside the mask are replaced before any arithmetic, so NaN or infinity there reaches neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.algorithms.terms import gap as gap_sums
from gspo_hpc.algorithms.terms import gap_buckets
from gspo_hpc.algorithms.terms.aggregation import Samples
from gspo_hpc.algorithms.terms.clipping import Clipped
from gspo_hpc.algorithms.terms.kl import k3
from gspo_hpc.algorithms.terms.ratios import Ratios
from gspo_hpc.ops.batch import PackedBatch

# Names of LossResult.sums and LossResult.maxima: always all of them, also for an empty micro-batch.
SUM_NAMES = (
    "ratio",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "reference_kl",
    *gap_sums.NAMES,
    "correction_fraction",
    "selected_fraction",
    "trained_length",
    *gap_buckets.NAMES,
)
MAX_NAMES = ("ratio_deviation_max", "logprob_gap_max")


@dataclass(frozen=True)
class LossResult:
    """The loss of a micro-batch, and its metrics.

    `sums` hold pairs (sum, count), to be added up over micro-batches and ranks and then divided; `maxima` are 0 where
    nothing counts. ratio, clip fractions: per sequence for "sequence", else per token. clip_fraction_low: A < 0 and
    ratio below the range; _high: A > 0 and ratio above it: the policy term has no gradient there. approx_kl: of the old
    policy against this one (k3). reference_kl: of this policy against the reference; count 0 without one. logprob_gap:
    |log pi_old - log pi_old as the engine saw it| per token; logprob_gap_...: see :mod:`terms.gap`; logprob_gap/...: by
    position and cached prefix. correction_fraction: policy terms that a correction or a mask of sequences dropped or
    bounded; count 0 without one. selected_fraction: tokens that have a policy term; count 0 where all have one.
    trained_length: tokens per sample.
    """

    loss: Tensor  # scalar
    sums: dict[str, Tensor]  # name -> [2]
    maxima: dict[str, Tensor]  # name -> scalar


def _identity(x: Tensor) -> Tensor:
    return x


def policy_loss(
    logprobs: Tensor,
    batch: PackedBatch,
    objective: Objective,
    *,
    denominator: float,
    cp_reduce: Callable[[Tensor], Tensor] = _identity,
    sampled_by_this: bool = False,
    entropy: Tensor | None = None,
) -> LossResult:
    """Return the loss of one micro-batch from its log-probs [R] under the current policy.

    Without old log-probs the policy that is updated is the one that sampled: all ratios are 1, with their gradient. An
    all-masked or empty micro-batch has loss 0 and gradient 0. Log-probs that are not finite inside the mask make the
    loss not finite, which the caller has to notice.

    `entropy` [R], with its gradient, is needed for a bonus alone.

    `sampled_by_this`: the weights under update are those that sampled, so that the gap between engine and trainer can
    be measured even if the old log-probs are the engine's.

    `cp_reduce` adds per-sample sums [S] up over context-parallel ranks that hold different tokens of the same samples:
    its forward is the sum, its backward passes the gradient on unchanged. Each rank then has the whole loss, and the
    gradient of its own tokens. Maxima stay those of the rank's own tokens.
    """
    assert denominator > 0 and logprobs.shape == batch.targets.shape, (denominator, logprobs.shape)
    assert not objective.by_sequence or objective.aggregation == "sequence", "one ratio a sequence has no token mean"
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    samples = Samples(batch.seq_ids, len(batch.keys), batch.loss_mask, dtype, cp_reduce, batch.prompt_tokens)
    current = samples.clean(logprobs)
    old = current.detach() if batch.old_logprobs is None else samples.clean(batch.old_logprobs)
    advantages = torch.where(samples.tokens > 0, batch.advantages.to(dtype), 0.0)

    rollout = samples.clean(batch.rollout_logprobs)
    gap = (old - rollout).detach()  # of the policy that sampled, not of the updated one
    ratios = objective.ratios(current, old, advantages, samples)
    clipped = objective.policy_terms(ratios)
    weights = objective.correction(gap, samples)
    terms = clipped.terms if weights is None else clipped.terms * weights
    kept = objective.kept(rollout - current.detach(), advantages, samples)
    terms = terms if kept is None else terms * kept
    terms = terms if batch.selected is None else torch.where(batch.selected, terms, 0.0)
    by_sequence = objective.by_sequence
    assert batch.selected is None or not by_sequence, "one term a sequence has no tokens to choose from"
    per_sample = terms if by_sequence else objective.aggregate(terms, samples)
    reference_kl = None
    if objective.loss_kl_beta > 0:
        assert batch.reference_logprobs is not None, "a KL term needs the reference's log-probs"
        reference_kl = objective.kl(samples.clean(batch.reference_logprobs) - current)
        if objective.kl_estimator == "unbiased":
            reference_kl = (current - old).exp() * reference_kl
        per_sample = per_sample + objective.kl_beta * objective.aggregate(reference_kl, samples)
    if objective.entropy_coef > 0:
        assert entropy is not None and entropy.requires_grad, "a bonus needs the gradient of the entropy"
        per_sample = per_sample - objective.entropy_coef * objective.aggregate(samples.clean(entropy), samples)
    loss = per_sample.sum() / denominator

    with torch.no_grad():
        corrected = _corrected(objective, weights, kept, gap, samples, by_sequence)
        if reference_kl is None and objective.kl_beta > 0 and batch.reference_logprobs is not None:  # in the reward
            reference_kl = k3(samples.clean(batch.reference_logprobs) - current)
        known = objective.correction_kind != "bypass" or sampled_by_this
        seen = gap if objective.correction_kind != "bypass" else current - rollout
        seen = seen if known else torch.zeros_like(gap)
        chosen = None if batch.selected is None else batch.selected & samples.mask
        of_tokens = {"reference_kl": reference_kl, "selected_fraction": chosen}
        size = seen.abs()
        difference = current - old if ratios.differences is None else ratios.differences.detach()
        sums, maxima = _metrics(samples, ratios, clipped, difference, size, of_tokens, corrected, by_sequence)
        places = batch.num_cached_tokens, batch.positions, batch.head_index
        by_place = cp_reduce(gap_buckets.sums_by_bucket(size, samples, *places))
        gaps = cp_reduce(gap_sums.sums(seen, size, samples.here.sum()))
        if not known:
            by_place, gaps = torch.zeros_like(by_place), torch.zeros_like(gaps)
        sums |= {name: torch.stack((gaps[i], gaps[-1])) for i, name in enumerate(gap_sums.NAMES)}
    sums |= dict(zip(gap_buckets.NAMES, by_place, strict=True))
    return LossResult(loss, {name: sums[name] for name in SUM_NAMES}, maxima)


def _corrected(
    objective: Objective,
    weights: Tensor | None,
    kept: Tensor | None,
    gap: Tensor,
    samples: Samples,
    by_sequence: bool,
) -> Tensor | None:
    """Return True [U] for policy terms that a correction bounded or dropped; None without any."""
    if weights is None and kept is None:
        return None
    dropped = [one == 0 for one in (weights, kept) if one is not None]
    if weights is not None and objective.correction_kind == "truncated":
        log_rho = samples.sum(gap) / samples.lengths if by_sequence else gap
        dropped.append(weights < log_rho.exp())
    return torch.stack(dropped).any(0)


def _metrics(
    samples: Samples,
    ratios: Ratios,
    clipped: Clipped,
    difference: Tensor,  # [R] log pi - log pi_old
    size: Tensor,  # [R] of the gap
    optional: dict[str, Tensor | None],  # [R] each: metrics of tokens that some objectives lack
    corrected: Tensor | None,  # [U] bool
    by_sequence: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums and maxima of :class:`LossResult`."""
    every, tokens = ratios.valid is samples.mask and samples.all_count, samples.tokens.sum()
    none = torch.zeros_like(tokens)
    log_ratio = ratios.log_ratio.detach()
    beyond_one = torch.expm1(log_ratio if every else torch.where(ratios.valid, log_ratio, 0.0))  # of the ratio

    def total(values: Tensor | None) -> Tensor:
        """Return the sum over what counts."""
        if values is None:
            return none
        if values.dtype == torch.bool:
            return torch.count_nonzero(values if every else values & ratios.valid).to(samples.dtype)
        return (values if every else torch.where(ratios.valid, values, 0.0)).sum()

    units = samples.here.sum() if ratios.valid is samples.mask else total(ratios.valid)
    of_units = {
        "ratio": beyond_one.sum() + units,
        "clip_fraction_low": total(clipped.low),
        "clip_fraction_high": total(clipped.high),
        "correction_fraction": total(corrected),
        "": units,
    }
    farthest = _largest(beyond_one.abs())
    divergence = beyond_one.sub_(difference) if ratios.differences is ratios.log_ratio else k3(difference)
    of_tokens = {
        "approx_kl": divergence.sum(),
        **{name: none if values is None else values.detach().to(none.dtype).sum() for name, values in optional.items()},
    }
    if by_sequence:  # which every context-parallel rank has whole
        whole = list(of_units.values())
        found = dict(zip(of_tokens, samples.reduce(torch.stack([*of_tokens.values()])), strict=True))
    else:
        parts = samples.reduce(torch.stack([*of_units.values(), *of_tokens.values()]))
        whole = list(parts[: len(of_units)])
        found = dict(zip(of_tokens, parts[len(of_units) :], strict=True))
    totals = dict(zip(of_units, whole, strict=True))
    count = totals.pop("")
    pairs = {name: (value, count) for name, value in totals.items()}
    pairs["clip_fraction"] = (totals["clip_fraction_low"] + totals["clip_fraction_high"], count)
    pairs |= {name: (value, tokens) for name, value in found.items()}
    for name, values in {"correction_fraction": corrected, **optional}.items():
        pairs[name] = (none, none) if values is None else pairs[name]
    pairs["trained_length"] = (tokens, (samples.tokens > 0).sum().to(samples.dtype))
    maxima = {"ratio_deviation_max": farthest, "logprob_gap_max": _largest(size)}
    assert {*pairs, *gap_sums.NAMES, *gap_buckets.NAMES} == {*SUM_NAMES} and tuple(maxima) == MAX_NAMES
    return {name: torch.stack(pair) for name, pair in pairs.items()}, maxima


def _largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())
