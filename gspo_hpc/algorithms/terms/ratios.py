"""Ratios of the current policy to the old one, in log space. Shapes: see :mod:`gspo_hpc.algorithms.terms`.

For sample i with |y_i| tokens and, per token t, d_it = log pi(y_it) - log pi_old(y_it), the ratio r is ::

    "sequence"        r_i  = exp(mean_t d_it)                         one per sequence: GSPO
    "sequence_token"  r_it = sg[r_i] * pi(y_it) / sg[pi(y_it)]        the same value, a gradient per token: GSPO-token
    "token"           r_it = exp(d_it)                                one per token: GRPO

GMPO's is the first of these from differences that are bounded token by token; see :func:`geometric_ratio`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_hpc.algorithms.terms.aggregation import Samples


class Ratios(NamedTuple):
    """The ratios of a micro-batch, each with the advantage that it multiplies."""

    log_ratio: Tensor  # [U]
    advantages: Tensor  # [U]
    valid: Tensor  # [U] bool, the ratios that count
    bounded: tuple[Tensor, Tensor] | None = None  # [U] shares of tokens that were bounded below and above, if any are
    change: Tensor | None = None  # [U] pi - pi_old of each token, without gradient, where a mask asks for it
    differences: Tensor | None = None  # [R] log pi - log pi_old, where they are known already


def sequence_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return one ratio per sequence, U = S, from log-probs [R] of both policies and advantages [S]."""
    differences = current - old
    return Ratios(samples.sum(differences) / samples.lengths, advantages, samples.tokens > 0, differences=differences)


def sequence_token_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return the sequence's ratio at each of its tokens, U = R, with the gradient of the token's own log-prob."""
    differences = (current - old).detach()
    mean = samples.at_tokens(samples.sum(differences) / samples.lengths)
    ratio = mean + (current - current.detach())
    return Ratios(ratio, _at_tokens(advantages, samples), samples.mask, differences=differences)


def token_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return one ratio per token, U = R."""
    differences = current - old
    return Ratios(differences, _at_tokens(advantages, samples), samples.mask, differences=differences)


def geometric_ratio(
    current: Tensor, old: Tensor, advantages: Tensor, samples: Samples, clip_low: float, clip_high: float
) -> Ratios:
    """Return exp(mean_t c_it), U = S: c_it = min(d_it, clip_high) where A > 0, and max(d_it, -clip_low) where A < 0.

    Tokens that are bounded have no gradient; the others of their sequence keep theirs.
    """
    differences = current - old
    lowest = torch.full_like(advantages, -torch.inf).masked_fill_(advantages < 0, -clip_low)
    highest = torch.full_like(advantages, torch.inf).masked_fill_(advantages > 0, clip_high)
    bound = differences.detach().clamp(samples.at_tokens(lowest), samples.at_tokens(highest))
    free = bound == differences
    share = samples.sum((~free).to(samples.dtype)) / samples.lengths
    shares = torch.where(advantages < 0, share, 0.0), torch.where(advantages > 0, share, 0.0)
    # The gradient of a clamp between tensors takes a CPU four times as long as that of a choice.
    log_ratio = samples.sum(torch.where(free, differences, bound)) / samples.lengths
    return Ratios(log_ratio, advantages, samples.tokens > 0, shares, differences=differences)


def _at_tokens(advantages: Tensor, samples: Samples) -> Tensor:
    """Return the advantage [R] of each token, from those of the samples [S]."""
    found = samples.at_tokens(advantages)
    return found if samples.all_count else torch.where(samples.mask, found, 0.0)


RATIOS = {"sequence": sequence_ratio, "sequence_token": sequence_token_ratio, "token": token_ratio}
