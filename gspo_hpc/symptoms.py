"""What `gspo-hpc diagnose` looks for: the evidence of a run, what a symptom is, and the list of all of them.

Floor 6. A symptom is a function from the evidence to a :class:`Symptom`, or None where the run does not show it: pure,
so that it can be tried on any evidence. They are in symptoms_learning.py (is there anything to learn, and is it
learnt), symptoms_speed.py (where time and memory go), symptoms_errors.py (what ended attempts, by its text) and
symptoms_end.py (restarts, and ends without a known text).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

from gspo_hpc import config_file
from gspo_hpc.algorithms import updates_per_rollout
from gspo_hpc.config import Config
from gspo_hpc.config_changes import may_change
from gspo_hpc.plan import make_plan
from gspo_hpc.report_data import Damage, value

Severity = Literal["problem", "warning", "note"]
Point = tuple[int, float]  # a step and what was logged of it

# Steps that say how a run is doing now: enough for a mean that one odd rollout does not decide, few enough to be of the
# present policy.
RECENT = 20
# Fewer steps than this show no state: the first ones have caches to fill and a warm-up of the learning rate.
ENOUGH = 4
# A trend wants twice as many: an early and a late part, each with more than one or two values.
ENOUGH_FOR_TREND = 8


@dataclass(frozen=True)
class Symptom:
    """Something wrong or slow. `problem`: the run has failed or learns nothing or wastes much; `warning`: it gets on,
    and this costs; `note`: worth knowing."""

    name: str
    severity: Severity
    evidence: tuple[str, ...]  # numbers, with steps or attempts
    cause: str
    settings: tuple[str, ...] = ()  # key=value, as for the command line, likeliest first
    look: tuple[str, ...] = ()  # where to look, or what to do, where no setting mends it
    restarts: bool = field(default=True, kw_only=True)  # whether a resumed run may take all the settings

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {key: list(part) if isinstance(part, tuple) else part for key, part in asdict(self).items()}


@dataclass(frozen=True)
class Told:
    """Text of a log, and where it stands (a path below the run directory)."""

    where: str
    text: str


@dataclass(frozen=True)
class AttemptEvidence:
    """One start of the run."""

    number: int
    reason: str  # as in attempt.json; "running", "killed"
    detail: str = ""
    exit_code: int | None = None
    where: str = ""
    reached: tuple[int, int] | None = None  # last logged step and finished groups, where the supervisor noted it
    steps: tuple[int, int] | None = None  # first and last that it logged
    versions: Mapping[str, str] = field(default_factory=dict)
    error: Told | None = None  # the first traceback among its ranks, or the stacks of the rank that hung
    said: tuple[Told, ...] = ()  # lines of its logs that speak of trouble
    devices: tuple[str, ...] = ()  # names that its ranks gave their devices

    @property
    def failed(self) -> bool:
        """Whether it ended badly, for whatever cause."""
        return self.reason in ("failed", "refused", "killed")


@dataclass(frozen=True)
class Evidence:
    """All that the symptoms look at. `records` are those of optimizer steps, in order."""

    path: str
    config: Config
    records: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[AttemptEvidence, ...] = ()
    job_said: tuple[Told, ...] = ()  # lines of the Slurm jobs' logs that speak of trouble
    seconds_since_step: float | None = None  # of a run that is running
    damaged: tuple[Damage, ...] = ()  # files of which something is missing in all the above

    @property
    def state(self) -> str:
        """ "done", "running", "new", or why the last attempt ended."""
        if not self.attempts:
            return "new"
        return self.attempts[-1].reason

    @property
    def steps(self) -> int:
        """Optimizer steps logged."""
        return max((int(record["step"]) for record in self.records), default=0)

    @property
    def recent(self) -> tuple[Mapping[str, Any], ...]:
        """The newest records: so many steps, and of as many rollouts as say something."""
        return self.records[-max(RECENT, ENOUGH * updates_per_rollout(self.config.batch)) :]

    @property
    def computed(self) -> tuple[Mapping[str, Any], ...]:
        """The recent ones in which there was something to learn: others have no passes to measure."""
        return tuple(record for record in self.recent if not record.get("empty"))

    def points(self, key: str, records: Sequence[Mapping[str, Any]] | None = None) -> list[Point]:
        """(step, number) of the records, by default all, that have one under this key."""
        found = ((int(r["step"]), value(r, key)) for r in (self.records if records is None else records))
        return [(step, number) for step, number in found if number is not None]

    def with_settings(self, *settings: str) -> Config:
        """The config with settings over it. Raises ValueError for one that is none."""
        raw = json.loads(json.dumps(asdict(self.config)))
        for text in settings:
            key, _, given = text.partition("=")
            *sections, last = key.split(".")
            inner = raw
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = yaml.safe_load(given)
        return config_file.from_dict(raw, "setting")


Finder = Callable[[Evidence], "Symptom | None"]


def found_in(evidence: Evidence, finders: Sequence[Finder]) -> Iterator[Symptom]:
    """The symptoms that the evidence shows, in the order of `finders`; settings that would change nothing are left out,
    as are those with which the plan would no longer hold."""
    for finder in finders:
        symptom = finder(evidence)
        if symptom is not None:
            kept = tuple(text for text in symptom.settings if _changes(evidence, text))
            restarts = all(may_change(text.split("=")[0]) for text in kept)
            yield Symptom(
                symptom.name, symptom.severity, symptom.evidence, symptom.cause, kept, symptom.look, restarts=restarts
            )


def _changes(evidence: Evidence, setting: str) -> bool:
    try:
        changed = evidence.with_settings(setting)
    except ValueError:
        return False
    if changed == evidence.config:
        return False
    # A run whose own plan does not hold (a part of a config) says nothing about the setting.
    return make_plan(changed).valid or not make_plan(evidence.config).valid


def middle(points: Sequence[Point]) -> float:
    """The median of the numbers."""
    return statistics.median(number for _, number in points)


def mean(points: Sequence[Point]) -> float:
    """The mean of the numbers."""
    return math.fsum(number for _, number in points) / len(points)


def span(points: Sequence[Point]) -> str:
    """ "steps 3 to 22", or "step 3"."""
    first, last = points[0][0], points[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def ends(points: Sequence[Point]) -> tuple[list[Point], list[Point]] | None:
    """The first and the last quarter of a series (at most RECENT steps each); None: too short for a trend."""
    if len(points) < ENOUGH_FOR_TREND:
        return None
    size = min(RECENT, max(2, len(points) // 4))
    return list(points[:size]), list(points[-size:])


def share_of_step(evidence: Evidence, key: str) -> tuple[float, float, list[Point]] | None:
    """Of the recent steps together: the share of their seconds that is under `key`, those seconds, and the points."""
    both = [r for r in evidence.recent if value(r, key) is not None and value(r, "seconds")]
    whole = math.fsum(value(r, "seconds") or 0.0 for r in both)
    if len(both) < ENOUGH or whole <= 0.0:
        return None
    points = evidence.points(key, both)
    seconds = math.fsum(number for _, number in points)
    return seconds / whole, seconds, points


def percent(share: float) -> str:
    """A share, to be read."""
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0.0 else f"{100 * share:.1f} %"


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.3g}"
