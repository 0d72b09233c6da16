"""The cause of a mismatch between engine and trainer, from how the gap is spread over tokens.

In a pair of tokens, the second is predicted from one key, so rotary embeddings, query and key weights and masks do
not matter. A swapped expert affects only the tokens routed to it. Rounded logits differ from one another by multiples
of a power of two. Otherwise weights or precision differ everywhere.

Shapes: P pairs of tokens, N tokens of the probe, L layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gspo_hpc.data.records import Experts, Floats

TOP = 8  # most likely tokens of a position, whose log-probs show how logits are rounded
_CLEAN = 0.25  # of the gap elsewhere: as small as this, tokens are not affected
_FEWEST = 3  # tokens from which something is concluded
_MOST_EXPERTS = 4  # of one layer: more have not been swapped, something else is wrong
_COARSEST, _FINEST = 1.0, 2.0**-12  # grids on which rounded logits may lie
_FLOAT_ERROR = 2.0**-17  # of a difference of log-probs in fp32
_ON_GRID = 0.9  # of the differences


@dataclass(frozen=True)
class ProbeAnswers:
    """Answers of engine and trainer once their gap was too large."""

    probe: Floats  # |gap| [N]
    pairs: Floats  # |gap| [P] of the second token
    experts: Experts | None = None  # of the first token [P, L, K]
    top: Floats | None = None  # log-probs [N, several] of the engine's most likely tokens, falling


def name_cause(found: ProbeAnswers) -> str:
    """Return the likeliest cause, as the end of a sentence."""
    if found.pairs.size >= _FEWEST and found.pairs.mean() <= _CLEAN * found.probe.mean():
        return (
            "tokens with several keys differ far more than others: query or key weights or those of a few layers, the "
            "mask, or rotary embeddings where engine or trainer do not say theirs"
        )
    if found.experts is not None and (swapped := swapped_experts(found.pairs, found.experts)) is not None:
        layer, numbers = swapped
        names = ("expert " if len(numbers) == 1 else "experts ") + " and ".join(str(number) for number in numbers)
        return f"only tokens that go to {names} of layer {layer} differ: experts are swapped or have older weights"
    step = None if found.top is None else rounding_step(found.top)
    if step is not None and found.probe.mean() <= step:  # rounding alone makes a quarter of it
        return (
            f"the engine rounds its logits to 16 bits: they are multiples of {step:g}; set "
            "rollout.engine.hf_overrides.head_dtype=float32"
        )
    also = "" if step is None else f"; its logits are rounded too, to multiples of {step:g}"
    return f"all tokens differ: the engine does not have the trainer's weights, or computes in another precision{also}"


def swapped_experts(gaps: Floats, experts: Experts) -> tuple[int, list[int]] | None:
    """Return the layer and the few experts to which all tokens with a gap go; None if there are none such.

    `gaps` [P] are those of tokens whose experts are `experts` [P, L, K]. A swap also changes later layers, so
    the layer is returned whose experts leave the smallest gap outside.
    """
    best: tuple[float, int, list[int]] | None = None
    for layer in range(experts.shape[1]):
        chosen, outside = _touching(gaps, experts[:, layer])
        if chosen and (best is None or outside < best[0]):
            best = (outside, layer, chosen)
    return None if best is None else (best[1], best[2])


def _touching(gaps: Floats, experts: Experts) -> tuple[list[int], float]:
    """Return the experts of a layer that explain the gaps, rising, and the mean gap outside as a part of that inside.

    Experts are chosen greedily, by the gap that they explain; tokens without a gap count against theirs. The list is
    empty if there are too many.
    """
    small = _CLEAN * float(np.sort(gaps)[-max(1, len(gaps) // 4) :].mean())
    inside = np.zeros(len(gaps), dtype=bool)
    chosen: list[int] = []
    while not inside.all():
        scores = {
            int(expert): float((gaps - small)[~inside & (experts == expert).any(axis=1)].sum())
            for expert in np.unique(experts[~inside])
        }
        most = max(scores, key=lambda expert: scores[expert])
        if scores[most] <= 0.0:
            break
        chosen.append(most)
        inside |= (experts == most).any(axis=1)
    if not 1 <= len(chosen) <= _MOST_EXPERTS or min(inside.sum(), (~inside).sum()) < _FEWEST:
        return [], 0.0
    outside = float(gaps[~inside].mean() / gaps[inside].mean())
    return (sorted(chosen), outside) if outside <= _CLEAN else ([], 0.0)


def rounding_step(top: Floats) -> float | None:
    """Return the coarsest power of two of which the differences within the rows of `top` are multiples; None for none.

    Log-probs of one row differ as their logits do. In bf16 logits between 2 and 4 are multiples of 1/64.
    """
    step = _COARSEST
    while step >= _FINEST:
        if share_on_grid(top, step) >= _ON_GRID:
            return step
        step /= 2
    return None


def share_on_grid(top: Floats, step: float = _FINEST) -> float:
    """Return the share of the differences within the rows of `top` that are multiples of `step`; 0 of too few.

    By chance 2 * _FLOAT_ERROR / step of them are: a sixteenth for the finest step (docs/agreement.md).
    """
    gaps = (top[:, :1] - top[:, 1:]).ravel().astype(np.float64)
    gaps = gaps[np.isfinite(gaps)]
    if gaps.size < 2 * _FEWEST or not gaps.any():
        return 0.0
    off = np.abs(gaps / step - np.round(gaps / step)) * step
    return float((off <= _FLOAT_ERROR).mean())
