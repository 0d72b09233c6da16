"""What the report shows, read from a run directory in whatever state it is: young, killed, torn or half copied.

Floor 6. Nothing here raises because a file is missing or has a line that is no record: what cannot be read
is not shown, and named in :attr:`RunData.damaged`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gspo_hpc import config_file
from gspo_hpc.config import Config
from gspo_hpc.durable import read_json
from gspo_hpc.redact import redact
from gspo_hpc.rundir import RunDir

LARGEST_LINE = 64 * 1024 * 1024  # bytes; a longer line is no record of ours
LARGEST_NUMBER = 1e300  # beyond it axes have no room; such a value counts as not finite


@dataclass(frozen=True)
class AttemptView:
    """One start of the run, as the timeline shows it. Times are unix seconds; None is not known."""

    number: int
    started: float | None
    ended: float | None
    reason: str
    detail: str
    where: str
    steps: tuple[int, int] | None

    @property
    def seconds(self) -> float | None:
        """How long it ran."""
        return None if self.started is None or self.ended is None else max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class Damage:
    """A file of the run that does not hold what was written there. A last line that a kill tore is none."""

    file: str  # below the run directory
    what: str
    hides: bool = False  # whether nobody can tell without it how far the run is, or how it ended


@dataclass(frozen=True)
class RunData:
    """Everything the page is made of. `records` are in order of their steps, one a step."""

    path: Path
    info: Mapping[str, Any]
    config: Config | None
    plan: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    attempts: tuple[AttemptView, ...]
    damaged: tuple[Damage, ...] = ()

    @property
    def name(self) -> str:
        """The run's name, or that of its directory."""
        return self.config.run.name if self.config is not None else self.path.name

    @property
    def train_records(self) -> list[Mapping[str, Any]]:
        """The records of optimizer steps: all but evaluations before the first one."""
        return [record for record in self.records if "reward" in record or "loss" in record]

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def max_steps(self) -> int | None:
        """The step the run ends at."""
        return self.config.run.max_steps if self.config is not None else None

    @property
    def state(self) -> str:
        """The reason for which the newest attempt ended, "running", or "new" before the first attempt."""
        if self.attempts:
            return self.attempts[-1].reason
        return "done" if self.max_steps and self.steps >= self.max_steps else "new"

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """(step, share of right greedy answers on unseen prompts), at the steps that were evaluated."""
        found = [(record["step"], value(record, "eval/accuracy")) for record in self.records]
        return [(step, share) for step, share in found if share is not None]

    @property
    def seconds(self) -> float:
        """What all attempts took, or the steps where nothing is known of attempts."""
        spans = [attempt.seconds for attempt in self.attempts]
        known = [span for span in spans if span is not None]
        return math.fsum(known or [value(record, "seconds") or 0.0 for record in self.records])

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens a second of all steps together, generation and updates included."""
        pairs = [(value(record, "completion_tokens"), value(record, "seconds")) for record in self.records]
        known = [(tokens, seconds) for tokens, seconds in pairs if tokens is not None and seconds]
        whole = math.fsum(seconds for _, seconds in known)
        return math.fsum(tokens for tokens, _ in known) / whole if whole > 0 else None

    def settings(self) -> dict[str, list[tuple[str, Any, bool]]]:
        """By section: key, value, and whether it is the default. Secrets are left out."""
        if self.config is None:
            return {}
        given, default = redact(dataclasses.asdict(self.config)), dataclasses.asdict(Config())
        return {
            section: [(key, inner, inner == default[section][key]) for key, inner in keys.items()]
            for section, keys in given.items()
        }


def read_run(run_dir: Path) -> RunData:
    """Read a run directory. Raises ValueError where there is none."""
    run = RunDir(run_dir)
    if not run.path.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    if not any(path.exists() for path in (run.info, run.config, run.metrics, run.attempts)):
        raise ValueError(f"{run_dir}: not a run directory (it has no run.json, config.yaml, metrics.jsonl or attempts)")
    lost: dict[Path, list[int]] = {run.metrics: [], run.samples: []}  # numbers of lines that are no records
    lines = _lines(run.metrics, lost[run.metrics], lambda record: _is_step(record.get("step")))
    by_step = {record["step"]: record for record in lines}
    records = tuple(by_step[step] for step in sorted(by_step))
    samples = _lines(run.samples, lost[run.samples])
    rows = {(str(row.get("step")), str(row.get("phase")), str(row.get("prompt"))): row for row in samples}
    raw, torn = read_attempts(run)
    return RunData(
        path=run.path,
        info=_mapping(run.info),
        config=_config(run),
        plan=_mapping(run.plan),
        records=records,
        samples=tuple(rows.values()),
        attempts=_attempts(raw, records),
        damaged=(*_damaged_files(run), *_damaged_attempts(raw, torn), *_damaged_lines(run, raw, records, lost)),
    )


def read_attempts(run: RunDir) -> tuple[list[dict[str, Any]], set[int]]:
    """attempt.json of every attempt, oldest first, as RunDir.read_attempts has it, and the numbers of those that cannot
    be read: these have the reason "unknown", or "running"."""
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError):
        raw = run.read_attempts()
        if all(isinstance(one, dict) and _is_step(one.get("attempt")) for one in raw):
            return raw, set()
    found, torn, holder = [], set(), {}
    with contextlib.suppress(OSError, ValueError):
        holder = run.holder() or {}
    numbers = {int(path.name): path for path in run.attempts.glob("*") if re.fullmatch("[0-9]+", path.name)}
    for number, folder in sorted(numbers.items()):
        path = folder / "attempt.json"
        one = _mapping(path)
        if path.exists() and (one.get("attempt") != number or "ended" not in one):
            torn.add(number)
            one = {}
        default = "running" if holder.get("attempt") == number else "unknown" if number in torn else "killed"
        reason = default if one.get("ended") is None else one.get("reason", "unknown")
        found.append(one | {"attempt": number, "ended": one.get("ended"), "reason": reason})
    return found, torn


def _damaged_files(run: RunDir) -> Iterator[Damage]:
    for path in (run.info, run.plan):
        if path.exists() and not _mapping(path):
            yield Damage(path.name, "is no JSON object")
    newest = sorted(run.path.glob("attempts/*/config.yaml"))[-1:]
    for path in (run.config, *newest):
        if path.exists() and not _is_yaml(path):
            yield Damage(str(path.relative_to(run.path)), "is no YAML mapping")


def _damaged_attempts(raw: Sequence[Mapping[str, Any]], torn: set[int]) -> Iterator[Damage]:
    newest = max((one["attempt"] for one in raw), default=0)
    for number in sorted(torn):
        yield Damage(f"attempts/{number:04d}/attempt.json", "is no record of an attempt", hides=number == newest)


def _damaged_lines(
    run: RunDir, raw: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], lost: Mapping[Path, list[int]]
) -> Iterator[Damage]:
    done = max((record["step"] for record in records), default=0)
    for path, numbers in lost.items():
        if numbers:
            shown = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
            what = f"line{'s' * (len(numbers) > 1)} {shown}: no record{'s' * (len(numbers) > 1)}"
            yield Damage(path.name, what, hides=path == run.metrics and not records)
    last = raw[-1] if raw else {}
    reached = last.get("reached")
    steps = reached[0] if isinstance(reached, list) and reached and _is_step(reached[0]) else 0
    saved = [int(path.parent.name) for path in run.checkpoints.glob("*/COMMITTED") if path.parent.name.isdigit()]
    missing = "has no record" if run.metrics.exists() else "is not there"
    if steps > done:
        yield Damage(
            run.metrics.name, f"{missing}{f' after step {done}' * bool(records)}; the run reached {steps}", True
        )
    elif not records and (last.get("reason") == "done" or max(saved, default=0) > 1):  # a save comes before its record
        why = "the run is done" if last.get("reason") == "done" else f"there is a checkpoint of step {max(saved)}"
        yield Damage(run.metrics.name, f"{missing}, and {why}", True)


def value(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record; None if it is missing, null, not finite or no number."""
    raw = record.get(key)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return None
    try:
        number = float(raw)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < LARGEST_NUMBER else None


def unix_time(text: Any) -> float | None:
    """Seconds of an ISO time; without a zone it is UTC."""
    try:
        when = datetime.fromisoformat(str(text))
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _is_step(step: Any) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 10**12


def _lines(
    path: Path, lost: list[int], wanted: Callable[[dict[str, Any]], bool] = lambda _: True
) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines that are wanted. `lost` gets the numbers of the other lines, but for a last
    one that a kill tore: an object without its end."""
    try:
        with open(path, "rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(LARGEST_LINE)):
                    return
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict) and wanted(record):
                    yield record
                elif line.endswith(b"\n") or not line.startswith(b"{"):
                    lost.append(number)
    except FileNotFoundError:
        return
    except OSError:
        lost.append(1)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (ValueError, OSError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_yaml(path: Path) -> bool:
    try:
        return isinstance(yaml.safe_load(path.read_text("utf-8")), dict)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False


def _config(run: RunDir) -> Config | None:
    for read in (run.load_config, lambda: config_file.load(run.config, [])):
        try:
            return read()
        except (ValueError, OSError):
            continue
    return None


def _attempts(raw: Sequence[Mapping[str, Any]], records: tuple[Mapping[str, Any], ...]) -> tuple[AttemptView, ...]:
    views: list[AttemptView] = []
    for one in raw:
        own = [record for record in records if record.get("attempt") == one.get("attempt")]
        times = [time for record in own if (time := value(record, "time")) is not None]
        # A killed attempt could not say when it ended: it lived at least until its last record.
        ended = unix_time(one["ended"]) if one.get("ended") else max(times, default=None)
        job = one.get("slurm_job_id")
        views.append(
            AttemptView(
                number=int(one.get("attempt", len(views) + 1)),
                started=unix_time(one.get("started")),
                ended=ended,
                reason=str(one.get("reason", "unknown")),
                detail=str(one.get("detail") or ""),
                where=f"{one.get('host', '')}{f', job {job}' if job else ''}",
                steps=(own[0]["step"], own[-1]["step"]) if own else None,
            )
        )
    return tuple(views)
