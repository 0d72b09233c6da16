"""The policy term of each ratio, by trust region. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 80.0  # of log r: a larger one would overflow in float32, and the gate is shut long before


class Clipped(NamedTuple):
    """The policy term of each ratio, and the bound that decided it, if one did."""

    terms: Tensor  # [U]
    # [U], bool or 1 and 0, or the share of a sequence's tokens where they are bounded before their mean. Bounds stop an
    # advantage above 0 at a high ratio and one below 0 at a low ratio, unless the function says otherwise.
    low: Tensor | None  # None where there is no such bound
    high: Tensor | None


def clipped_terms(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Clipped:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) from log r [U] and A [U].

    With `dual_clip` c the term of A < 0 is -max(min(...), c A): a ratio above c has no gradient, and is "high" too.
    The branch is chosen before the exponential, so a ratio that overflows but is clipped leaves no NaN in the gradient.
    """
    least, most = math.log1p(-clip_low), math.log1p(clip_high)
    positive, negative = advantages > 0, advantages < 0
    low, high = negative & (log_ratio < least), positive & (log_ratio > most)
    free = (positive | negative) ^ (low | high)
    bound = log_ratio.detach().clamp(least, most)
    if dual_clip:
        far = negative & (log_ratio > math.log(dual_clip))
        free, high = free ^ far, high | far
        bound = torch.where(far, math.log(dual_clip), bound)
    return Clipped(-torch.where(free, log_ratio, bound).exp() * advantages, low, high)


def weighted_terms(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log r (CISPO) from log r [U] and A [U].

    The gradient is that of -sg(...) A log pi, from which the value differs by a constant. No ratio loses its gradient;
    "low" and "high" are the weights that were bounded, whatever the sign of A.
    """
    ratio = log_ratio.detach().exp()
    least, most = 1.0 - clip_low, 1.0 + clip_high
    weights = ratio.clamp(least, most).mul_(advantages).neg_()
    low = torch.lt(ratio, least, out=torch.empty_like(ratio)) if least > 0 else None
    return Clipped(weights * log_ratio, low, ratio.gt_(most))


def masked_terms(
    log_ratio: Tensor, advantages: Tensor, change: Tensor, clip_low: float, clip_high: float, weight_max: float
) -> Clipped:
    """Return -sg(min(r, weight_max)) A log r where the mask keeps it, else 0 (DPPO) from log r [U] and A [U].

    `change` [U] is the change of the token's probability, pi - pi_old: it is dropped above clip_high where A > 0, and
    below -clip_low where A < 0. The value differs by a constant from that with log pi.
    """
    low, high = (advantages < 0) & (change < -clip_low), (advantages > 0) & (change > clip_high)
    weights = log_ratio.detach().clamp(max=math.log(weight_max)).exp()
    return Clipped(-torch.where(low | high, 0.0, weights * advantages * log_ratio), low, high)


def gated_terms(log_ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Clipped:
    """Return -(4 / t) sigmoid(t (r - 1)) A (SAPO) from log r [U] and A [U]: t is `positive` where A > 0."""
    # A clamp, whose gradient takes a CPU a quarter of the time.
    ratio = torch.nn.functional.hardtanh(log_ratio, -math.inf, _LARGEST).exp()
    # By the sign of A: half of the time of a choice.
    temperature = advantages.sign().mul_((positive - negative) / 2.0).add_((positive + negative) / 2.0)
    scale = (-4.0 * advantages).div_(temperature)
    return Clipped(torch.sigmoid(temperature * (ratio - 1.0)) * scale, None, None)
