"""The reward of a completion, and what a pool keeps of completions until they have one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_hpc.data.outcomes import Outcome
from gspo_hpc.rewards.calls import LARGEST, Sampled
from gspo_hpc.rewards.catalogue import Turn


@dataclass(frozen=True)
class RewardResult:
    """The reward of one completion: `value` is the weighted sum of its parts, 0 if a grader failed."""

    value: float
    parts: dict[str, float]  # by grader (see part_names), clipped but not weighed; without those that failed
    failure: str | None  # the graders that failed, and why
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by grader, of those that failed or tell it
    # Of each grader's last call; one that grades a whole group took it for all of them.
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    turn: Turn | None = None  # of a call of an environment: its answer


def weighted(values: Mapping[int, float], weights: Mapping[int, float]) -> tuple[float, str | None]:
    """Return the weighted sum of the values by term, or 0 and why it cannot be used.

    It is summed in the order of the weights, which is the configuration's, and not in that of arrival.
    """
    total = math.fsum(weight * values[term] for term, weight in weights.items())
    return (total, None) if abs(total) <= LARGEST else (0.0, f"the weighted sum {total} is beyond {LARGEST:g}")


@dataclass(frozen=True, eq=False)
class OpenGroup:
    """The completions of a prompt that were submitted together, with their keys."""

    keys: Sequence[Hashable]
    sampled: Sequence[Sampled]
    prompt: str
    fields: Mapping[str, Any]
    weights: Mapping[int, float]  # of the terms that grade it


@dataclass
class OpenCompletion:
    """A completion that is being graded."""

    group: OpenGroup
    index: int  # among the completions of its group
    values: dict[int, float] = field(default_factory=dict)  # by term
    failures: dict[int, str] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    turn: Turn | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One grader, by its term, on completions, by their keys: on one, or on a group where it grades whole groups."""

    keys: tuple[Hashable, ...]
    term: int
    tries: int = 0  # that ended without an answer
    failed: int = 0  # that had a failure as their answer
