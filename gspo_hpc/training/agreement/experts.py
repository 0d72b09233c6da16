"""Experts of engine and trainer, held against each other by the sums of their weights.

Log-probs of a few sequences do not tell two exchanged experts among many from rounding in 16 bits: few tokens go to
either, and both are a small part of what a layer adds. Their sums do; see :mod:`gspo_hpc.ops.expert_sums`.
"""

from __future__ import annotations

import numpy as np

from gspo_hpc.data.records import Floats

_ROUNDING = 2e-3  # of the norm of an expert's weights: far more than float32 loses on the way to their sum
_SHOWN = 3


def misplaced(ours: Floats, theirs: Floats) -> str:
    """Return which experts of the engine have other weights than the trainer's; an empty text if none has.

    Both have the sums [layers, experts, NUMBERS], and NaN where nothing is known. Experts whose weights are no numbers
    in the trainer are left to the probe.
    """
    wrong = ~_same(ours, theirs) & np.isfinite(ours).all(-1) & ~np.isnan(theirs).any(-1)
    if not wrong.any():
        return ""
    told = []
    for layer, expert in np.argwhere(wrong)[:_SHOWN].tolist():
        (others,) = np.nonzero(_same(ours[layer], theirs[layer, expert][None]))
        has = f"those of the trainer's expert {others[0]}" if len(others) else "those of none of the trainer's"
        told.append(f"expert {expert} of layer {layer} has {has}")
    more = int(wrong.sum()) - len(told)
    return ", ".join(told) + (f", and {more} more are wrong" if more else "")


def _same(ours: Floats, theirs: Floats) -> np.ndarray:
    """Return where two arrays [..., NUMBERS] of sums are those of the same weights [...]."""
    squares = ours[..., 1::2]
    with np.errstate(invalid="ignore"):  # infinite less infinite
        of_sums = np.abs(ours[..., ::2] - theirs[..., ::2]) <= _ROUNDING * np.sqrt(squares)
        of_squares = np.abs(squares - theirs[..., 1::2]) <= _ROUNDING * squares
    return np.asarray((of_sums & of_squares).all(-1))
