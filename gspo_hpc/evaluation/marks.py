"""Scores of an evaluation as a whole, and of each of its parts: what is known of every prompt, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_hpc.evaluation.scores import Scores, greedy_scores, sample_scores


@dataclass(frozen=True)
class Marks:
    """The marks of the answers to one prompt. `part` is its source or set; "" for other prompts."""

    part: str
    right: bool  # the greedy answer
    length: int  # of it, in tokens that the model sampled
    graded: bool  # it is; else the function that decides failed, and it counts as wrong
    samples: tuple[bool, ...] = ()  # whether each is right
    samples_graded: bool = False  # whether any of them is
    majority: float | None = None  # how far the answer of most samples is right; None: nobody knows which are alike


def scores(prompts: Sequence[Marks]) -> Scores:
    """Return the scores of all prompts, named `eval/...`, and of each part that has a name, `eval/PART/...`."""
    found = _scores(prompts)
    for part in dict.fromkeys(one.part for one in prompts):
        if part:
            own = _scores([one for one in prompts if one.part == part])
            found |= {f"eval/{part}/{name.removeprefix('eval/')}": value for name, value in own.items()}
    return found


def _scores(prompts: Sequence[Marks]) -> Scores:
    """Return the scores of some prompts; those of k samples are of the prompts that have k."""
    ungraded = sum(not one.graded for one in prompts)
    found = greedy_scores([one.right for one in prompts], [one.length for one in prompts], ungraded)
    for count in dict.fromkeys(len(one.samples) for one in prompts):
        if count:
            own = [one for one in prompts if len(one.samples) == count]
            votes = [one.majority for one in own if one.majority is not None]
            graded = any(one.samples_graded for one in own)
            found |= sample_scores([one.samples for one in own], votes if len(votes) == len(own) else None, graded)
    return found
