"""Scores of sampled answers: avg@k, pass@k, and how sure a share is.

A table of right answers has one row a prompt and one truth value a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def avg_at_k(right: Sequence[Sequence[bool]]) -> float:
    """Return the share of right samples of a prompt, averaged over prompts; every prompt weighs the same."""
    _check_table(right, 1)
    return math.fsum(sum(map(bool, row)) / len(row) for row in right) / len(right)


def pass_at_k(right: Sequence[Sequence[bool]], k: int) -> float:
    """Return the chance that at least one of k samples is right, averaged over prompts.

    The unbiased estimate from n >= k samples with c right ones: `1 - C(n - c, k) / C(n, k)`, the share of all ways to
    draw k of the n that hold a right one. Raises ValueError if a prompt has fewer than k samples, or k < 1.
    """
    _check_table(right, k)
    return math.fsum(_pass(len(row), sum(map(bool, row)), k) for row in right) / len(right)


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share: it stays within [0, 1], also for few trials and shares near 0 or 1."""
    if not (0 <= successes <= total and total > 0 and 0.0 < confidence < 1.0):
        raise ValueError(
            f"{successes} of {total} at confidence {confidence}: need 0 <= successes <= total, total >= 1 and a "
            "confidence between 0 and 1"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends one bound is 0 or 1 exactly; rounding must not put the share itself outside.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == total else (centre + spread) / scale
    return low, high


def _pass(n: int, c: int, k: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _check_table(right: Sequence[Sequence[bool]], k: int) -> None:
    if not right:
        raise ValueError("no prompts to score")
    if k < 1 or (fewest := min(len(row) for row in right)) < k:
        raise ValueError(f"k is {k}: needs 1 <= k <= samples of every prompt" + (f" ({fewest})" if k >= 1 else ""))
