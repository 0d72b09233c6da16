"""The objectives, as pure functions on one packed micro-batch.

Floor 2. Shapes: R response tokens, S samples (completions). For sample i with |y_i| tokens, advantage A_i and, per
token t, log-ratio d_it = log pi(y_it) - log pi_old(y_it), the ratio r is ::

    "sequence"        r_i  = exp(mean_t d_it)                         one per sequence: GSPO
    "sequence_token"  r_it = sg[r_i] * pi(y_it) / sg[pi(y_it)]        the same value, a gradient per token: GSPO-token
    "token"           r_it = exp(d_it)                                one per token: GRPO

and every ratio gives the term -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Terms of tokens are averaged over
their sequence (aggregation "sequence") or only summed ("token"). The loss is their sum over the samples divided by
`denominator`: give the number of samples, or of tokens, that the mean is to be over.

With kl_beta > 0 each token adds kl_beta * (exp(e) - 1 - e), e = log pi_ref - log pi (the estimator known as k3: never
negative, unbiased on the policy's own samples), averaged over its sequence or summed just as above.

Ratios are computed in fp32 (float64 stays float64): near 1 a bf16 number cannot tell a clip range of 3e-4. Places
outside the mask are replaced before any arithmetic, so NaN or infinity there reaches neither value nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gspo_hpc.batch import PackedBatch

# Names of LossResult.sums and LossResult.maxima: always all of them, also for an empty micro-batch.
SUM_NAMES = (
    "ratio",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "reference_kl",
    "gap",
    "trained_length",
)
MAX_NAMES = ("ratio_deviation_max", "gap_max")


class Objective(Protocol):
    """What the loss asks of an objective (gspo_hpc.algorithms.Objective has it)."""

    @property
    def ratio(self) -> str:
        """ "sequence", "sequence_token" or "token"."""

    @property
    def clip_low(self) -> float:
        """Ratios are clipped to at least 1 - clip_low."""

    @property
    def clip_high(self) -> float:
        """Ratios are clipped to at most 1 + clip_high."""

    @property
    def aggregation(self) -> str:
        """ "sequence" or "token"."""

    @property
    def kl_beta(self) -> float:
        """Weight of the KL term."""


@dataclass(frozen=True)
class LossResult:
    """The loss of a micro-batch, and what was seen on the way.

    `sums` hold pairs (sum, count), to be added up over micro-batches and ranks and then divided; `maxima` are 0 where
    nothing counts. ratio, clip fractions: per sequence for "sequence", else per token. clip_fraction_low: A < 0 and
    ratio below the range; _high: A > 0 and ratio above it: the policy term has no gradient there. approx_kl: of the old
    policy against this one (k3). reference_kl: of this policy against the reference; count 0 without one. gap:
    |log pi_old - log pi_old as the engine saw it| per token. trained_length: tokens per sample.
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
) -> LossResult:
    """Loss of one micro-batch from its log-probs [R] under the current policy.

    Without old log-probs the policy that is updated is the one that sampled: all ratios are 1, with their gradient. An
    all-masked or empty micro-batch has loss 0 and gradient 0. Log-probs that are not finite inside the mask make the
    loss not finite, which is for the caller to notice.

    `cp_reduce` adds per-sample sums [S] up over context-parallel ranks that hold different tokens of the same samples:
    its forward is the sum, its backward passes the gradient on unchanged. Each rank then has the whole loss, and the
    gradient of its own tokens. Maxima stay those of the rank's own tokens.
    """
    assert denominator > 0 and logprobs.shape == batch.targets.shape, (denominator, logprobs.shape)
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    mask, ids, samples = batch.loss_mask, batch.seq_ids, len(batch.keys)

    def clean(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(dtype), 0.0)

    def per_sample(x: Tensor) -> Tensor:
        """Sums of per-token values [R] over each sample, [S]."""
        return cp_reduce(x.new_zeros(samples).index_add(0, ids, x))

    current = clean(logprobs)
    old = current.detach() if batch.old_logprobs is None else clean(batch.old_logprobs)
    difference = current - old
    counts = per_sample(mask.to(dtype))
    lengths = counts.clamp(min=1.0)
    advantages = torch.where(counts > 0, batch.advantages.to(dtype), 0.0)

    by_sequence = objective.ratio == "sequence"
    if by_sequence:
        assert objective.aggregation == "sequence", "a ratio of a sequence has no mean over tokens"
        log_ratio, of_each, valid = per_sample(difference) / lengths, advantages, counts > 0
    else:
        of_each, valid = torch.where(mask, advantages[ids], 0.0), mask
        if objective.ratio == "sequence_token":
            log_ratio = (per_sample(difference).detach() / lengths)[ids] + (current - current.detach())
        else:
            assert objective.ratio == "token", objective.ratio
            log_ratio = difference
    terms, low, high = _clipped_terms(log_ratio, of_each, objective)

    def aggregate(x: Tensor) -> Tensor:
        summed = per_sample(x)
        return summed / lengths if objective.aggregation == "sequence" else summed

    per_loss = terms if by_sequence else aggregate(terms)
    reference_kl = None
    if objective.kl_beta > 0:
        assert batch.reference_logprobs is not None, "a KL term needs the reference's log-probs"
        reference_kl = _k3(clean(batch.reference_logprobs) - current)
        per_loss = per_loss + objective.kl_beta * aggregate(reference_kl)
    loss = per_loss.sum() / denominator

    with torch.no_grad():
        ratio = torch.where(valid, log_ratio, 0.0).exp()
        gap = (old - clean(batch.rollout_logprobs)).abs()  # of the policy that sampled, not of the one being updated
        tokens = counts.sum()
        none = tokens.new_zeros(())

        def total(x: Tensor) -> Tensor:
            x = torch.where(valid, x.to(dtype), 0.0)
            return x.sum() if by_sequence else per_sample(x).sum()

        count = total(valid)
        lows, highs = total(low), total(high)
        pairs = {
            "ratio": (total(ratio), count),
            "clip_fraction": (lows + highs, count),
            "clip_fraction_low": (lows, count),
            "clip_fraction_high": (highs, count),
            "approx_kl": (per_sample(_k3(difference)).sum(), tokens),
            "reference_kl": (none, none) if reference_kl is None else (per_sample(reference_kl).sum(), tokens),
            "gap": (per_sample(gap).sum(), tokens),
            "trained_length": (tokens, (counts > 0).sum().to(dtype)),
        }
        maxima = {"ratio_deviation_max": _largest((ratio - 1.0).abs()), "gap_max": _largest(gap)}
    assert tuple(pairs) == SUM_NAMES and tuple(maxima) == MAX_NAMES
    return LossResult(loss, {name: torch.stack(pair) for name, pair in pairs.items()}, maxima)


def _clipped_terms(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r) A) from log r, and where the lower and the upper bound decided it.

    The branch is chosen before the exponential, so a ratio that overflows but is clipped leaves no NaN in the gradient.
    """
    low = (advantages < 0) & (log_ratio < math.log1p(-objective.clip_low))
    high = (advantages > 0) & (log_ratio > math.log1p(objective.clip_high))
    free = ~(low | high) & (advantages != 0)
    ratio = torch.where(free, log_ratio, 0.0).exp()
    ratio = torch.where(low, 1.0 - objective.clip_low, torch.where(high, 1.0 + objective.clip_high, ratio))
    return -ratio * advantages, low, high


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x: an estimate of KL(p || q) from a sample of p, x = log q - log p."""
    return torch.expm1(log_ratio) - log_ratio


def _largest(x: Tensor) -> Tensor:
    return x.max() if x.numel() else x.new_zeros(())
