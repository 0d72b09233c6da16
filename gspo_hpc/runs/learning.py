"""Judge from its records whether a run learnt anything, for the console, status, the report and messages alike.

A run that ends well as a program may have taught its model nothing, or have harmed it, and must not look healthy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo_hpc.runs.reader import accuracy, not_graded, value
from gspo_hpc.system.text import rounded

Grade = Literal["learnt", "doubtful", "lost", "nothing"]
_SHARES: dict[Grade, float] = {"learnt": 1.0, "doubtful": 0.5, "lost": 0.0, "nothing": 0.0}
_PART = 10  # the first and the last part of a run that are compared: a tenth of its rollouts each
_LONG = 20  # rollouts from which on a part has several, so that its mean is more than the luck of one
_FELL = 0.1  # of the accuracy, where a record does not have its interval


@dataclass(frozen=True)
class Learning:
    """Account of what a run learnt, in words: `numbers` say how reward and accuracy went, and `worry` what is wrong."""

    grade: Grade
    numbers: str
    worry: str = ""  # a clause that goes on after "done": "learnt nothing: ..."; empty if nothing is wrong

    @property
    def share(self) -> float:
        """Return the grade as a number for curves: 1 learnt, 0.5 in doubt, 0 learnt nothing or lost what it had."""
        return _SHARES[self.grade]

    @property
    def nothing(self) -> bool:
        """Return whether no step can have taught the model anything."""
        return self.grade == "nothing"


@dataclass(frozen=True)
class Course:
    """Account of how a metric went over a run: its means over the first and over the last tenth of the rollouts.

    A rollout's value is the mean of its updates. Either part has one rollout at the least. This is what "reward a -> b"
    means wherever it is said.
    """

    first: float
    last: float
    part: int  # rollouts of either part
    rollouts: int  # that have a value

    @property
    def is_one(self) -> bool:
        """True where there is one rollout alone, and so nothing to compare."""
        return self.rollouts == 1


def course(records: Sequence[Mapping[str, Any]], key: str = "reward") -> Course | None:
    """Return how a metric of the records of metrics.jsonl went; None where no step has it."""
    means = _rollout_means([record for record in records if (value(record, "step") or 0.0) > 0], key)
    return Course(*_ends(means), _part(means), len(means)) if means else None


def judge(records: Sequence[Mapping[str, Any]]) -> Learning | None:
    """Judge the records of metrics.jsonl, in their order; None before the first step."""
    steps = [record for record in records if (value(record, "step") or 0.0) > 0 and _is_update(record)]
    if not steps:
        return None
    means, scores = _rollout_means(steps), [one for record in records if (one := _Score.of(record)) is not None]
    empty = sum(bool(record.get("empty")) for record in steps)
    parts, rose = [], False
    went = course(steps)
    if went is not None and went.is_one:
        parts.append(f"reward {went.last:.3f} in the only rollout")
        rose = went.last != 0.0
    elif went is not None:
        parts.append(f"reward {went.first:.3f} -> {went.last:.3f}")
        rose = went.last > went.first
    if not any("reward" in record for record in steps):  # a teacher is the only signal
        distances = divergences(steps)
        if len(distances) == 2:
            parts.append(towards_teacher(*distances))
            rose = distances[-1] < distances[0]
    if len(scores) >= 2:
        parts.append(f"accuracy on unseen prompts {scores[0].share:.3f} -> {scores[-1].share:.3f}")
        rose = rose or scores[-1].share > scores[0].share
    if why := next((not_graded(record) for record in reversed(records) if "eval/accuracy" in record), ""):
        parts.append(f"the latest evaluation was {why}")
    if empty:
        parts.append(f"{empty:,} of {len(steps):,} step{'s' * (len(steps) != 1)} had nothing to learn from")
    numbers = "; ".join(parts) or "no completion got a reward"
    if cause := _no_gradient(steps):
        return Learning("nothing", numbers, f"learnt nothing: {cause}")
    if worry := _lost(means, scores):
        return Learning("lost", numbers, worry)
    if empty * 2 >= len(steps):
        return Learning("doubtful", numbers, "learnt little: most steps had nothing to learn from")
    if not rose:
        means_what = "neither reward nor accuracy rose" if means else "the policy came no nearer to its teacher"
        return Learning("doubtful", numbers, f"may have learnt nothing: {means_what}")
    return Learning("learnt", numbers)


def divergences(records: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return the divergence from the reference or the teacher at first and at last; one number of a single rollout."""
    went = course(records, "reference_kl")
    if went is None:
        return ()
    return (went.last,) if went.is_one else (went.first, went.last)


def towards_teacher(first: float, last: float) -> str:
    """Return in words how far a policy was from its teacher at first, and at last."""
    return f"divergence from the teacher {first:.4f} -> {last:.4f} nats a token"


@dataclass(frozen=True)
class _Score:
    """The accuracy of one evaluation, and its 95 % interval."""

    step: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> _Score | None:
        share = accuracy(record)
        if share is None:
            return None
        low, high = value(record, "eval/accuracy_low"), value(record, "eval/accuracy_high")
        low, high = share - _FELL / 2 if low is None else low, share + _FELL / 2 if high is None else high
        return cls(int(record["step"]), share, low, high)


def _is_update(record: Mapping[str, Any]) -> bool:
    return any(key in record for key in ("reward", "loss", "seconds"))


def _rollout_means(steps: Sequence[Mapping[str, Any]], key: str = "reward") -> list[float]:
    """Return the mean of a metric of each rollout, in their order."""
    rollouts: dict[int, list[float]] = {}
    for record in steps:
        if (known := value(record, key)) is not None:
            rollouts.setdefault(int(record.get("rollout", record["step"])), []).append(known)
    return [statistics.fmean(rewards) for rewards in rollouts.values()]


def _ends(means: Sequence[float]) -> tuple[float, float]:
    some = _part(means)
    return statistics.fmean(means[:some]), statistics.fmean(means[-some:])


def _part(means: Sequence[float]) -> int:
    return max(1, len(means) // _PART)


def _no_gradient(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return why no step can have changed the model for the better; empty if one can."""
    rewards = [reward for record in steps if (reward := value(record, "reward")) is not None]
    if not rewards and any("reward" in record for record in steps):
        return "no completion got a reward"
    spreads = [value(record, "reward_std") for record in steps]
    if rewards and all(spread == 0.0 for spread in spreads) and max(rewards) == min(rewards):
        return f"the reward of every completion was {rounded(rewards[0])}"
    if all(record.get("empty") for record in steps):
        return "in every group all completions had the same reward, so no step had a gradient"
    if all(record.get("empty") or record.get("skipped") for record in steps):
        return "no step had a gradient that is finite"
    norms = [value(record, "grad_norm") for record in steps]
    if all(norm == 0.0 for norm in norms):
        return "the gradient of every step was 0"
    return ""


def _lost(means: Sequence[float], scores: Sequence[_Score]) -> str:
    """Return in words that accuracy or reward was better before than at the end; empty if it was not."""
    if len(scores) >= 2:
        best, last = max(scores, key=lambda score: score.share), scores[-1]
        if last.high < best.low:
            return (
                f"lost accuracy: {best.share:.3f} on unseen prompts at step {best.step:,}, {last.share:.3f} at the end"
            )
    if len(means) >= _LONG:
        first, end = _ends(means)
        some = _part(means)
        best_part = max(statistics.fmean(means[at : at + some]) for at in range(0, len(means) - some + 1, some))
        if first < best_part and end - first < (best_part - first) / 2:
            return f"lost reward: {best_part:.3f} at best, {end:.3f} at the end"
    return ""
