"""Scores of answers: accuracy, avg@k, pass@k, maj@k, how sure a share or a mean is, and how two models differ.

A table of right answers has one row a prompt and one truth value a sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

_DRAWS = 2000  # of the bootstrap

Scores = dict[str, float | None]  # by name; None where nothing was graded, so that there is nothing to say


def greedy_scores(right: Sequence[bool], lengths: Sequence[int], ungraded: int) -> Scores:
    """Return the scores of greedy answers by name.

    `eval/accuracy_low` and `eval/accuracy_high` are the bounds of the 95 % interval of the accuracy (Wilson).
    `ungraded` is the number of answers for which the reward function failed: they count as wrong, and `eval/ungraded`
    is their share. Where it failed for all, the accuracy is None, for it was not measured.
    """
    graded = ungraded < len(right)
    low, high = wilson_interval(sum(right), len(right))
    scores: Scores = {
        "eval/accuracy": sum(right) / len(right) if graded else None,
        "eval/accuracy_low": low if graded else None,
        "eval/accuracy_high": high if graded else None,
        "eval/response_length": sum(lengths) / len(lengths),
    }
    return scores | ({"eval/ungraded": ungraded / len(right)} if ungraded else {})


def sample_scores(table: Sequence[Sequence[bool]], majorities: Sequence[float] | None, graded: bool) -> Scores:
    """Return the scores of k samples a prompt by name, with the bounds of their 95 % intervals (bootstrap).

    `majorities` has the value of each prompt's :func:`majority`, None where nobody knows which answers are alike. All
    are None where none of the samples was `graded`.
    """
    k = len(table[0])
    found = {f"eval/avg@{k}": avg_at_k(table), f"eval/pass@{k}": pass_at_k(table, k)}
    if majorities is not None:
        found[f"eval/maj@{k}"] = list(majorities)
    scores: Scores = {}
    for name, values in found.items():
        low, high = mean_interval(values) if graded else (None, None)
        mean = math.fsum(values) / len(values) if graded else None
        scores |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return scores


def avg_at_k(right: Sequence[Sequence[bool]]) -> list[float]:
    """Return the share of right samples of each prompt."""
    _check_table(right, 1)
    return [sum(map(bool, row)) / len(row) for row in right]


def pass_at_k(right: Sequence[Sequence[bool]], k: int) -> list[float]:
    """Return for each prompt the chance that at least one of k samples is right.

    The unbiased estimate from n >= k samples with c right ones: `1 - C(n - c, k) / C(n, k)`, the share of all ways to
    draw k of the n that hold a right one. Raises ValueError if a prompt has fewer than k samples, or k < 1.
    """
    _check_table(right, k)
    return [_pass(len(row), sum(map(bool, row)), k) for row in right]


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return how far the answer that most samples of a prompt give is right: 1, 0, or a share where answers tie.

    Right samples have one answer, however it is written. Samples without an answer do not vote, and no votes are wrong.
    """
    votes = Counter(
        "" if fits else f"wrong {answer}"
        for answer, fits in zip(answers, right, strict=True)
        if fits or answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    return (votes[""] == most) / sum(count == most for count in votes.values())


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the mean of values of prompts: percentiles of the means of 2,000 draws with replacement.

    The draws are the same each time. Equal values, of which all draws are alike, get Wilson's interval of a share.
    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no prompts to score")
    if min(values) == max(values):
        return _score_interval(values[0], len(values), confidence)
    return _drawn_interval(values, confidence)


def difference_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the mean of paired differences, from -1 to 1: prompts are drawn again, as above.

    Differences that are all alike leave no width to a draw. Their interval goes as far to both sides as Wilson's upper
    bound of a share of which none of so many prompts was seen. Raises ValueError without differences.
    """
    if not differences:
        raise ValueError("no prompts to compare")
    if min(differences) == max(differences):
        _, reach = _score_interval(0.0, len(differences), confidence)
        return max(-1.0, differences[0] - reach), min(1.0, differences[0] + reach)
    return _drawn_interval(differences, confidence)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided, for prompts that one of two models alone answers rightly.

    It is the chance of a split at least as uneven where either model is as likely to be the one that is right.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"{only_first} and {only_second} prompts: neither number can be negative")
    total, fewer = only_first + only_second, min(only_first, only_second)
    ways = term = 1
    for taken in range(fewer):
        term = term * (total - taken) // (taken + 1)
        ways += term
    return min(1.0, 2 * ways / 2**total)


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share: it stays within [0, 1], also for few trials and shares near 0 or 1."""
    if not (0 <= successes <= total and total > 0 and 0.0 < confidence < 1.0):
        raise ValueError(
            f"{successes} of {total} at confidence {confidence}: need 0 <= successes <= total, total >= 1 and a "
            "confidence between 0 and 1"
        )
    return _score_interval(successes / total, total, confidence)


def _drawn_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    import numpy as np  # a report, which only shows completions, does without it

    drawn = np.random.default_rng(0).integers(len(values), size=(_DRAWS, len(values)))
    means = np.asarray(values, np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _score_interval(share: float, total: int, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends one bound is 0 or 1 exactly; rounding must not put the share itself outside.
    low = 0.0 if share == 0.0 else (centre - spread) / scale
    high = 1.0 if share == 1.0 else (centre + spread) / scale
    return low, high


def _pass(n: int, c: int, k: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _check_table(right: Sequence[Sequence[bool]], k: int) -> None:
    if not right:
        raise ValueError("no prompts to score")
    if k < 1 or (fewest := min(len(row) for row in right)) < k:
        raise ValueError(f"k is {k}: needs 1 <= k <= samples of every prompt" + (f" ({fewest})" if k >= 1 else ""))
