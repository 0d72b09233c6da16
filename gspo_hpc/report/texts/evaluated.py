"""Answers of the newest stored evaluation, to read: right, wrong, and those that no function could grade.

The page has some of each kind, so that it stays small, and lets a reader choose a kind and a set without any script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.stored import Asked
from gspo_hpc.report.scales import number
from gspo_hpc.report.texts.samples import Card, Completion, fields, frame_of, passage, tone
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import RunData
from gspo_hpc.system.text import shortened

Outcome = Literal["failed", "wrong", "right"]

OUTCOMES: tuple[Outcome, ...] = ("failed", "wrong", "right")  # in the order of the page
MOST_OF_EACH = 20


@dataclass(frozen=True)
class Read:
    """A prompt with the greedy answer, what became of it, and what more there is to say."""

    outcome: Outcome
    part: str  # the set, empty for prompts of none
    card: Card
    note: str


@dataclass(frozen=True)
class Evaluated:
    """The answers that are shown of an evaluation, and how many of each kind it has."""

    title: str
    file: str  # within the run directory
    counts: dict[Outcome, int]  # of the kinds that there are
    answers: tuple[Read, ...]

    @property
    def parts(self) -> list[str]:
        """The sets of the answers that are shown."""
        return sorted({one.part for one in self.answers})

    @property
    def left_out(self) -> int:
        """Number of answers that the page does not have."""
        return sum(self.counts.values()) - len(self.answers)


def evaluated(run: RunData) -> Evaluated | None:
    """Return answers of the newest stored evaluation; None if there is none that can be read."""
    directory = RunDir(run.path)
    if not (steps := directory.stored_evaluations()):
        return None
    path = stored.find(run.path, max(steps))
    try:
        found = stored.read(path).prompts
    except (ValueError, OSError):  # `compare` and `rescore` say what is wrong with it
        return None
    kinds = [_outcome(one) for one in found]
    counts = Counter(kinds)
    shown = list[Asked]()
    for kind in OUTCOMES:
        shown += _in_turn([one for one, its in zip(found, kinds, strict=True) if its == kind])[:MOST_OF_EACH]
    frame = frame_of([one.prompt for one in shown])
    return Evaluated(
        title=f"Answers at step {max(steps)}",
        file=str(path.relative_to(run.path)),
        counts={kind: counts[kind] for kind in OUTCOMES if counts[kind]},
        answers=tuple(_read(one, frame) for one in shown),
    )


def _in_turn(prompts: Sequence[Asked]) -> list[Asked]:
    """Return the prompts with those of several sets in turn, so that the first of them are of all sets."""
    places, seen = list[int](), Counter[str]()
    for one in prompts:
        places.append(seen[one.part])
        seen[one.part] += 1
    return [one for _, one in sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0])]


def _outcome(one: Asked) -> Outcome:
    if not one.greedy.graded:
        return "failed"
    return "right" if one.greedy.right else "wrong"


def _read(one: Asked, frame: tuple[str, str]) -> Read:
    begin, end = frame
    outcome, reward = _outcome(one), one.greedy.raw.get("reward")
    answer = Completion("Greedy answer", passage(one.greedy.text))
    if outcome != "failed" and isinstance(reward, int | float):
        answer = replace(answer, reward=number(float(reward)), tone=tone(float(outcome == "right")))
    asked = Card(passage(one.prompt.removeprefix(begin).removesuffix(end)), tuple(fields(one.fields)), (answer,))
    return Read(outcome, one.part, asked, "; ".join(_notes(one, outcome)))


def _notes(one: Asked, outcome: Outcome) -> list[str]:
    failure, notes = one.greedy.raw.get("failure"), [one.part] if one.part else []
    if outcome == "failed":
        notes.append(shortened(str(failure or "not graded"), 300))
    if one.greedy.raw.get("finish_reason") == "length":
        notes.append("cut off")
    if one.samples:
        notes.append(f"{sum(each.right for each in one.samples)} of {len(one.samples)} samples are right")
    return notes
