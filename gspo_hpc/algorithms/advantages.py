"""Advantages of a group of completions: how much better each is than the others of its prompt.

With normalisation `A_i = (r_i - mean) / std` over the n samples of the group that are not
excluded; std is the sample standard deviation (divisor n - 1). The GSPO and GRPO papers write "std" and leave the
divisor open; TRL and verl use n - 1, so advantages compare with theirs. They also add an epsilon (1e-4, 1e-6) to keep
a group of equal rewards from dividing by zero; here such a group gets zeros, and no other is bent by an epsilon.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.records import Floats

# Rewards that differ by less than this part of the largest are equal: float32 noise (0.1 + 0.2 against 0.3) would
# otherwise be blown up to advantages of one.
NOISE = 1e-6


def group_advantages(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    excluded: Sequence[bool] | npt.NDArray[np.bool_],
    normalize: bool,
) -> Floats:
    """Advantages of one group, float32 [n]; without `normalize` they are `r - mean`.

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
    centred = scaled - scaled.mean()
    if normalize:
        result = centred / centred.std(ddof=1)
    else:
        limit = np.finfo(np.float32).max
        with np.errstate(over="ignore"):
            result = np.clip(centred * peak, -limit, limit)
    advantages[kept] = result
    return advantages
