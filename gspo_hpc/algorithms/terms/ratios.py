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


def sequence_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return one ratio per sequence, U = S, from log-probs [R] of both policies and advantages [S]."""
    return Ratios(samples.sum(current - old) / samples.lengths, advantages, samples.tokens > 0)


def sequence_token_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return the sequence's ratio at each of its tokens, U = R, with the gradient of the token's own log-prob."""
    mean = (samples.sum(current - old).detach() / samples.lengths)[samples.ids]
    return Ratios(mean + (current - current.detach()), _at_tokens(advantages, samples), samples.mask)


def token_ratio(current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
    """Return one ratio per token, U = R."""
    return Ratios(current - old, _at_tokens(advantages, samples), samples.mask)


def geometric_ratio(
    current: Tensor, old: Tensor, advantages: Tensor, samples: Samples, clip_low: float, clip_high: float
) -> Ratios:
    """Return exp(mean_t c_it), U = S: c_it = min(d_it, clip_high) where A > 0, and max(d_it, -clip_low) where A < 0.

    Tokens that are bounded have no gradient; the others of their sequence keep theirs.
    """
    difference, at = current - old, _at_tokens(advantages, samples)
    low, high = (at < 0) & (difference < -clip_low), (at > 0) & (difference > clip_high)
    difference = torch.where(low, -clip_low, torch.where(high, clip_high, difference))
    shares = tuple(samples.sum(where.to(samples.dtype)) / samples.lengths for where in (low, high))
    valid = samples.tokens > 0
    return Ratios(samples.sum(difference) / samples.lengths, advantages, valid, (shares[0], shares[1]))


def _at_tokens(advantages: Tensor, samples: Samples) -> Tensor:
    """Return the advantage [R] of each token, from those of the samples [S]."""
    return torch.where(samples.mask, advantages[samples.ids], 0.0)


RATIOS = {"sequence": sequence_ratio, "sequence_token": sequence_token_ratio, "token": token_ratio}
