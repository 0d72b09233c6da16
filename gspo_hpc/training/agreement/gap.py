"""The gap between the log-probs of engine and trainer, and what of it is allowed.

In 16 bits an improbable token's log-prob is mostly rounding: its logit is far below the largest, and no completion
samples it. So there each token's gap is weighted with its probability, as the tokens of a rollout are by being sampled.
In float32 rounding is small everywhere, and every token counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from gspo_hpc.config.derived import GapLimits
from gspo_hpc.data.records import Floats
from gspo_hpc.system.text import rounded

_LEAST_WEIGHT = 1e-3  # of a token: else the likeliest one of a probe of improbable tokens would decide alone
_GROWTH = 4.0  # times the gap of the first sync that later ones may have, in 16 bits
_OF_ROUNDING = 2.0  # times what noise of the size of rounding makes: one draw of it and one engine differ by chance
HARMLESS = 0.2  # of the mean that is allowed: gaps below it are never too large for growth alone


@dataclass(frozen=True)
class Gap:
    """Differences |log p - log q| of tokens, in nats; infinite where a log-prob is not finite."""

    max: float = 0.0
    mean: float = 0.0
    weighted_max: float = 0.0  # of p |log p - log q|, with the larger of both probabilities as p
    weighted_mean: float = 0.0  # the mean with p as weight, and a thousandth more
    # Step of the grid on which the engine's logits lie, because its head rounds them; 0: none is seen.
    logit_step: float = 0.0

    def values(self) -> tuple[float, ...]:
        """Return the numbers, which ranks reduce to their maxima."""
        return astuple(self)

    def with_largest(self, other: Gap) -> Gap:
        """Return the larger of each number."""
        return Gap(*map(max, self.values(), other.values()))


@dataclass
class Baseline:
    """The gaps of a run's first sync and first update, in whichever attempt: later ones are judged against them.

    It is saved with checkpoints, so that an attempt that resumes does not take those of bad weights for the first.
    """

    probe: Gap | None = None
    update: float | None = None  # mean |log p - log q| of its tokens

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Baseline:
        """Return what :meth:`to_dict` gave. Raises TypeError or ValueError for other values."""
        probe, update = values.get("probe"), values.get("update")
        numbers = None if probe is None else {str(name): float(value) for name, value in probe.items()}
        return cls(None if numbers is None else Gap(**numbers), None if update is None else float(update))


def measure(ours: Sequence[Floats], theirs: Sequence[Floats]) -> Gap:
    """Return the gap over all tokens of these sequences of log-probs."""
    one, other = np.concatenate(list(ours)).astype(np.float64), np.concatenate(list(theirs)).astype(np.float64)
    gaps = np.abs(one - other)
    if not np.isfinite(gaps).all():
        return Gap(*[float("inf")] * 4)
    weights = np.exp(np.maximum(one, other))
    mean = np.average(gaps, weights=weights + _LEAST_WEIGHT)
    return Gap(*differences(ours, theirs), float((weights * gaps).max()), float(mean))


def differences(ours: Sequence[Floats], theirs: Sequence[Floats]) -> tuple[float, float]:
    """Return the largest and the mean |difference| in float32."""
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
    return float(gaps.max()), float(gaps.mean())


def excess(gap: Gap, allowed: GapLimits, first: Gap | None, rounding: Gap | None = None) -> str | None:
    """Return what of `gap` is not allowed, with the numbers; None if it is small enough.

    `first` is the gap of the first sync, above which it must not rise far in 16 bits either. `rounding` is the gap that
    rounding alone makes in the trainer, twice of which is always allowed; None where that is not known.
    """
    if rounding is None or not all(map(math.isfinite, rounding.values())):
        rounding = Gap()  # a trainer that has no numbers excuses no engine
    always = Gap(*(_OF_ROUNDING * value for value in rounding.values()))
    allowed = allowed._replace(max=max(allowed.max, always.weighted_max), mean=max(allowed.mean, always.weighted_mean))
    if not allowed.weighted:
        largest, mean, kind = gap.max, gap.mean, "|log-prob difference|"
    else:
        largest, mean, kind = gap.weighted_max, gap.weighted_mean, "|log-prob difference| weighted by probability"
    if not (largest <= allowed.max and mean <= allowed.mean):
        bounds = rounded(allowed.max), rounded(allowed.mean)
        return f"max {kind} {largest:.2e} (allowed {bounds[0]}), mean {mean:.2e} (allowed {bounds[1]})"
    if allowed.weighted and first is not None:
        most = max(_GROWTH * first.weighted_mean, HARMLESS * allowed.mean, always.weighted_mean)
        if mean > most:
            return f"mean {kind} {mean:.2e}, and {first.weighted_mean:.2e} at the first sync (allowed {rounded(most)})"
    return None
