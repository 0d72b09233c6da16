"""The evidence of a run: its config, the records of its steps, and how its attempts ended.

Symptoms are pure functions of the evidence, so that a test can try them on any. The helpers at the end summarize series
of numbers and write them into sentences.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.derived import updates_per_rollout
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.runs.learning import Learning
from gspo_hpc.runs.reader import Damage, value

Point = tuple[int, float]  # a step, and a number that was logged for it

# The newest steps that describe the present state of a run: enough for a mean that one unusual rollout does not decide,
# few enough to belong to the current policy.
RECENT = 20
# A shorter run shows no state: its first steps fill caches and warm up the learning rate.
ENOUGH = 4
# A trend needs twice as many steps: an early and a late part, each with more than one value.
ENOUGH_FOR_TREND = 8
# Share of the time: below a tenth a fix gains nothing; above three tenths it is the first thing to fix.
SLOW, VERY_SLOW = 0.1, 0.3


@dataclass(frozen=True)
class Excerpt:
    """Text quoted from a log, and the log's path below the run directory."""

    where: str
    text: str

    @property
    def before(self) -> str:
        """Advice to read the log before the text, as a symptom says where to look."""
        return f"{self.where}: read the lines before the error"


@dataclass(frozen=True)
class AttemptEvidence:
    """One start of the run."""

    number: int
    reason: str  # as in attempt.json; "running" and "killed" come from its absence
    detail: str = ""
    exit_code: int | None = None
    where: str = ""
    reached: tuple[int, int] | None = None  # last logged step and finished groups, if the supervisor noted them
    steps: tuple[int, int] | None = None  # the first and the last step that it logged
    versions: Mapping[str, str] = field(default_factory=dict)
    error: Excerpt | None = None  # the first traceback among its ranks, or the stacks of the rank that hung
    excerpts: tuple[Excerpt, ...] = ()  # lines of its logs that match a pattern of a symptom
    devices: tuple[str, ...] = ()  # names of the devices, as its ranks logged them

    @property
    def failed(self) -> bool:
        """Return whether it ended badly, for whatever cause."""
        return self.reason in ("failed", "refused", "killed")


@dataclass(frozen=True)
class Evidence:
    """Everything that symptoms look at. `records` are those of optimizer steps, in order."""

    path: str
    config: Config
    records: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[AttemptEvidence, ...] = ()
    job_excerpts: tuple[Excerpt, ...] = ()  # lines of the newest Slurm job's logs that match a pattern of a symptom
    seconds_since_step: float | None = None  # only of a run that is running
    reward_failures: Mapping[str, int] = field(default_factory=dict)  # what failed -> how often, as far as it is known
    learning: Learning | None = None  # the judgement that console, status and report show; None before the first step
    damaged: tuple[Damage, ...] = ()  # files whose content is missing from all of the above

    @property
    def state(self) -> str:
        """State of the run: "done", "running", "new", or the reason why the last attempt ended."""
        if not self.attempts:
            return "new"
        return self.attempts[-1].reason

    @property
    def steps(self) -> int:
        """Number of the last optimizer step that was logged."""
        return max((int(record["step"]) for record in self.records), default=0)

    @property
    def recent(self) -> tuple[Mapping[str, Any], ...]:
        """The newest records: at least RECENT steps, and at least ENOUGH rollouts."""
        return self.records[-max(RECENT, ENOUGH * updates_per_rollout(self.config.batch)) :]

    @property
    def computed(self) -> tuple[Mapping[str, Any], ...]:
        """The recent records with an update; a step without any advantage computes nothing that could be measured."""
        return tuple(record for record in self.recent if not record.get("empty"))

    def points(self, key: str, records: Sequence[Mapping[str, Any]] | None = None) -> list[Point]:
        """(step, number) of each record that has a number under `key`; `records` defaults to all."""
        found = ((int(r["step"]), value(r, key)) for r in (self.records if records is None else records))
        return [(step, number) for step, number in found if number is not None]

    def with_settings(self, *settings: str) -> Config:
        """Return the config with `key=value` settings applied. Raises ValueError for a setting that is not valid.

        A text may have several settings that belong together, with spaces between them.
        """
        raw = json.loads(json.dumps(as_dict(self.config)))
        for text in (one for several in settings for one in _TOGETHER.split(several)):
            key, _, given = text.partition("=")
            *sections, last = key.split(".")
            inner = raw
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = loader.read_value(key.split("."), given)
        return loader.from_dict(raw, "setting")


_TOGETHER = re.compile(r" (?=[a-z_]+\.[a-z_.]+=)")  # between two settings


def middle(points: Sequence[Point]) -> float:
    """Return the median of the numbers."""
    return statistics.median(number for _, number in points)


def mean(points: Sequence[Point]) -> float:
    """Return the mean of the numbers."""
    return math.fsum(number for _, number in points) / len(points)


def steps_of(steps: list[int]) -> str:
    """Return "step 3" or "steps 3, 4", the first five of them."""
    shown = ", ".join(map(str, steps[:5]))
    return f"steps {shown}, ..." if len(steps) > 5 else f"step{'s' * (len(steps) > 1)} {shown}"


def span(points: Sequence[Point]) -> str:
    """Write the steps of a series: "steps 3 to 22", or "step 3"."""
    first, last = points[0][0], points[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def ends(points: Sequence[Point]) -> tuple[list[Point], list[Point]] | None:
    """Return the first and the last quarter of a series, at most RECENT steps each; None if it is too short."""
    if len(points) < ENOUGH_FOR_TREND:
        return None
    size = min(RECENT, max(2, len(points) // 4))
    return list(points[:size]), list(points[-size:])


def share_of_step(evidence: Evidence, key: str) -> tuple[float, float, list[Point]] | None:
    """Return how much of the recent steps' wall time is logged under `key`: the share, the seconds, and the points.

    None if fewer than ENOUGH recent steps have both.
    """
    both = [r for r in evidence.recent if value(r, key) is not None and value(r, "seconds")]
    whole = math.fsum(value(r, "seconds") or 0.0 for r in both)
    if len(both) < ENOUGH or whole <= 0.0:
        return None
    points = evidence.points(key, both)
    seconds = math.fsum(number for _, number in points)
    return seconds / whole, seconds, points


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0.0 else f"{100 * share:.1f} %"
