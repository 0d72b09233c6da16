"""Advantages of a group of completions: how much better each is than the others of its prompt.

With normalisation `A_i = (r_i - mean) / std` over the n samples of the group that are not
excluded; std is the sample standard deviation (divisor n - 1). The GSPO and GRPO papers write "std" and leave the
divisor open; TRL and verl use n - 1, so advantages compare with theirs. They also add an epsilon (1e-4, 1e-6) to keep
a group of equal rewards from dividing by zero; here such a group gets zeros, and no other is bent by an epsilon.

Other kinds: "leave_one_out" `n / (n - 1) (r_i - mean)`, the reward minus the mean of the others; "maxrl"
`(r_i - mean) / mean`, where a group whose mean is not above 0 gets zeros; "batch_std" and "reinforce_baseline" are
`r_i - mean` here, and :func:`batch_scale` says what the rollout divides them by. "gdpo" is :func:`by_reward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.algorithm import Advantage
from gspo_hpc.data.records import Floats

# Rewards that differ by less than this part of the largest are equal: float32 noise (0.1 + 0.2 against 0.3) would
# otherwise be blown up to advantages of one.
NOISE = 1e-6


def group_advantages(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    excluded: Sequence[bool] | npt.NDArray[np.bool_],
    normalize: bool,
    kind: Advantage = "group",
) -> Floats:
    """Advantages of one group, float32 [n]; without `normalize` they are not divided by its standard deviation.

    rewards, excluded: [n]. Excluded samples get 0 and have no part in mean and std, whatever their reward is (NaN
    too). Equal rewards and a single survivor give exactly 0. Everything is computed in float64; the result is finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    kept = ~np.asarray(excluded, dtype=bool)
    assert values.shape == kept.shape and values.ndim == 1
    assert np.isfinite(values[kept]).all(), "a reward that is not a number was neither refused nor excluded"
    advantages = np.zeros(values.shape, dtype=np.float32)
    if kept.sum() < 2:
        return advantages
    alive = values[kept]
    peak = np.abs(alive).max()
    if alive.max() / 2 - alive.min() / 2 <= NOISE * (peak / 2):
        return advantages
    scaled = alive / peak  # so that no square over- or underflows
    mean = scaled.mean()
    centred = scaled - mean
    if kind == "leave_one_out":
        centred = centred * (len(alive) / (len(alive) - 1))
    if kind == "maxrl":
        result = centred / mean if mean > NOISE else np.zeros_like(centred)
    elif normalize and kind == "leave_one_out":
        result = centred / scaled.std(ddof=1)
    elif normalize:
        result = centred / centred.std(ddof=1)
    else:
        limit = np.finfo(np.float32).max
        with np.errstate(over="ignore"):
            result = np.clip(centred * peak, -limit, limit)
    advantages[kept] = result
    return advantages


def by_reward(
    rewards: npt.NDArray[np.floating], weights: Sequence[float], excluded: Sequence[bool] | npt.NDArray[np.bool_]
) -> Floats:
    """Advantages of one group with several rewards, float32 [n]: each reward normalised by itself, weighed, added up.

    rewards: [n, k], weights: [k], excluded: [n]. So a reward counts by its weight, however widely it spreads (GDPO,
    arXiv 2601.05242). A reward that is equal in the whole group adds 0.
    """
    assert rewards.ndim == 2 and rewards.shape[1] == len(weights)
    total = np.zeros(len(rewards), dtype=np.float64)
    for values, weight in zip(rewards.T, weights, strict=True):
        total += weight * group_advantages(values, excluded, True).astype(np.float64)
    return total.astype(np.float32)


def batch_scale(
    rewards: npt.NDArray[np.floating],
    advantages: npt.NDArray[np.floating],
    excluded: npt.NDArray[np.bool_],
    kind: Advantage,
) -> float:
    """Return what the advantages [N] of a whole rollout are divided by; 1 for kinds that look at their group alone.

    "batch_std" is the sample standard deviation of its rewards, "reinforce_baseline" that of the advantages, rewards
    without the mean of their group, and so is "gdpo", whose advantages have a mean of 0 in each group, too; all over
    the samples that count. Without any deviation it is 1: all are 0.
    """
    if kind not in ("batch_std", "reinforce_baseline", "gdpo"):
        return 1.0
    values = np.asarray(rewards if kind == "batch_std" else advantages, dtype=np.float64)[~excluded]
    peak = np.abs(values).max(initial=0.0)
    if len(values) < 2 or values.max() / 2 - values.min() / 2 <= NOISE * (peak / 2):
        return 1.0
    return float((values / peak).std(ddof=1) * peak)
