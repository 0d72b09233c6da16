"""Reading a run directory in any state: just started, killed, damaged or copied only in part.

`report` and `diagnose` read runs through this module. It never raises because a file is missing or a line
cannot be parsed: what cannot be read is left out and listed in :attr:`RunData.damaged`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader, yaml_text
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.runs.directory import ATTEMPT_FILE, RunDir, wrong_record
from gspo_hpc.system.files import read_json
from gspo_hpc.system.redact import redact
from gspo_hpc.system.text import first_line, parse_json, printable, shortened

LARGEST_LINE = 64 * 1024 * 1024  # bytes; we write no longer records
LARGEST_NUMBER = 1e300  # larger values would overflow an axis; they count as not finite


@dataclass(frozen=True)
class AttemptView:
    """One start of the run. Times are in unix seconds, or None if they are not known."""

    number: int
    started: float | None
    ended: float | None
    reason: str
    detail: str
    where: str
    steps: tuple[int, int] | None  # the first and the last step it logged

    @property
    def seconds(self) -> float | None:
        """Seconds that the attempt ran, or None if its start or end is not known."""
        return None if self.started is None or self.ended is None else max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class Damage:
    """A file of the run that does not hold what was written to it.

    An incomplete last line is normal after a kill and does not count.
    """

    file: str  # relative to the run directory
    what: str  # continues a sentence that begins with the file: "is not a JSON object"
    hides: bool = False  # without this file it is unknown how far the run got or how it ended


@dataclass(frozen=True)
class RunData:
    """The content of a run directory. `records` holds one record per step, in order."""

    path: Path
    info: Mapping[str, Any]
    config: Config | None
    plan: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    attempts: tuple[AttemptView, ...]
    damaged: tuple[Damage, ...] = ()
    experts: tuple[int, dict[int, list[int]]] | None = None  # step; tokens of each expert, by layer

    @property
    def name(self) -> str:
        """The name of the run, or of its directory if there is no config."""
        return self.config.run.name if self.config is not None else self.path.name

    @property
    def train_records(self) -> list[Mapping[str, Any]]:
        """The records of optimizer steps, without that of the evaluation before the first step."""
        return [record for record in self.records if "reward" in record or "loss" in record]

    @property
    def steps(self) -> int:
        """Number of optimizer steps that are done."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def max_steps(self) -> int | None:
        """The step at which the run ends, or None if there is no config."""
        return self.config.run.max_steps if self.config is not None else None

    @property
    def state(self) -> str:
        """The reason for which the latest attempt ended, "running", or "new" before the first attempt.

        Without any attempts on record it is "done" if all steps are.
        """
        if self.attempts:
            return self.attempts[-1].reason
        return "done" if self.max_steps and self.steps >= self.max_steps else "new"

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Pairs (step, share of correct greedy answers to unseen prompts) of all evaluations."""
        found = [(record["step"], accuracy(record)) for record in self.records]
        return [(step, share) for step, share in found if share is not None]

    @property
    def not_graded(self) -> list[tuple[int, str]]:
        """Pairs (step, "not graded" and why) of all evaluations of which no answer was graded."""
        found = [(record["step"], not_graded(record)) for record in self.records]
        return [(step, why) for step, why in found if why]

    @property
    def seconds(self) -> float:
        """Seconds that all attempts took together; if no attempt is known, the seconds of all steps."""
        spans = [attempt.seconds for attempt in self.attempts]
        known = [span for span in spans if span is not None]
        return math.fsum(known or [value(record, "seconds") or 0.0 for record in self.records])

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens per second over all steps, updates included, or None if no step has both numbers."""
        pairs = [(value(record, "completion_tokens"), value(record, "seconds")) for record in self.records]
        known = [(tokens, seconds) for tokens, seconds in pairs if tokens is not None and seconds]
        whole = math.fsum(seconds for _, seconds in known)
        return math.fsum(tokens for tokens, _ in known) / whole if whole > 0 else None

    def settings(self) -> dict[str, list[tuple[str, Any, bool]]]:
        """Return each section: its keys, their values, and whether these are the defaults; secrets are left out."""
        if self.config is None:
            return {}
        given, default = redact(as_dict(self.config)), as_dict(Config())
        return {
            section: [(key, inner, inner == default[section].get(key)) for key, inner in keys.items()]
            for section, keys in given.items()
        }


def read_run(run_dir: Path) -> RunData:
    """Read a run directory. Raises ValueError if there is none at this path."""
    run = RunDir(run_dir)
    if not run.path.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    if not any(path.exists() for path in (run.info, run.config, run.metrics, run.attempts)):
        raise ValueError(f"{run_dir}: not a run directory (it has no run.json, config.yaml, metrics.jsonl or attempts)")
    lost: dict[Path, list[int]] = {run.metrics: [], run.samples: []}  # numbers of the lines that are not records
    records = tuple(read_records(run, lost[run.metrics]))
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
        experts=_experts(_mapping(run.experts)),
    )


def read_records(run: RunDir, lost: list[int] | None = None) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl by step, the last one of each; append the numbers of other lines to `lost`.

    Only their steps are sure to be there: read other numbers with :func:`value`.
    """
    lines = _lines(run.metrics, [] if lost is None else lost, lambda record: _is_step(record.get("step")))
    by_step = {record["step"]: record for record in lines}
    return [by_step[step] for step in sorted(by_step)]


def read_attempts(run: RunDir) -> tuple[list[dict[str, Any]], set[int]]:
    """Return attempt.json of every attempt, oldest first, and the numbers of those that cannot be read.

    The former are as RunDir.read_attempts returns them. An attempt that cannot be read gets the reason "unknown", or
    "running" if it holds the lock of the run.
    """
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError):
        raw = run.read_attempts()
        if all(isinstance(one, dict) and _is_step(one.get("attempt")) for one in raw):
            return raw, set()
    found, torn, holder = [], set(), {}
    with contextlib.suppress(OSError, ValueError):
        holder = run.holder() or {}
    numbers = {int(path.name): path for path in run.attempts.glob("*") if re.fullmatch("[0-9]+", path.name)}
    for number, folder in sorted(numbers.items()):
        path = folder / ATTEMPT_FILE
        one = _mapping(path)
        if path.exists() and wrong_record(one, number):
            torn.add(number)
            one = {}
        default = "running" if holder.get("attempt") == number else "unknown" if number in torn else "killed"
        reason = default if one.get("ended") is None else one.get("reason", "unknown")
        found.append(one | {"attempt": number, "ended": one.get("ended"), "reason": reason})
    return found, torn


def _damaged_files(run: RunDir) -> Iterator[Damage]:
    for path in (run.info, run.plan):
        if path.exists() and not _mapping(path):
            yield Damage(path.name, "is not a JSON object")
    newest = sorted(run.path.glob("attempts/*/config.yaml"))[-1:]
    for path in (run.config, *newest):
        if path.exists() and not _is_yaml(path):
            yield Damage(str(path.relative_to(run.path)), "is not a YAML mapping")


def _damaged_attempts(raw: Sequence[Mapping[str, Any]], torn: set[int]) -> Iterator[Damage]:
    newest = max((one["attempt"] for one in raw), default=0)
    for number in sorted(torn):
        yield Damage(f"attempts/{number:04d}/{ATTEMPT_FILE}", "is not the record of an attempt", hides=number == newest)


def _damaged_lines(
    run: RunDir, raw: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], lost: Mapping[Path, list[int]]
) -> Iterator[Damage]:
    done = max((record["step"] for record in records), default=0)
    for path, numbers in lost.items():
        if numbers:
            shown = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
            what = f"lines {shown} are not records" if len(numbers) > 1 else f"line {shown} is not a record"
            yield Damage(path.name, what, hides=path == run.metrics and not records)
    last = raw[-1] if raw else {}
    reached = last.get("reached")
    steps = reached[0] if isinstance(reached, list) and reached and _is_step(reached[0]) else 0
    saved = [int(path.parent.name) for path in run.checkpoints.glob("*/COMMITTED") if path.parent.name.isdecimal()]
    missing = "has no record" if run.metrics.exists() else "is missing"
    if steps > done:
        yield Damage(
            run.metrics.name, f"{missing}{f' after step {done}' * bool(records)}; the run reached {steps}", True
        )
    elif not records and (last.get("reason") == "done" or max(saved, default=0) > 1):  # a save comes before its record
        why = "the run is done" if last.get("reason") == "done" else f"there is a checkpoint of step {max(saved)}"
        yield Damage(run.metrics.name, f"{missing}, although {why}", True)


def value(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a record, or None if it is missing, null, not finite or not a number."""
    raw = record.get(key)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return None
    try:
        number = float(raw)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < LARGEST_NUMBER else None


def accuracy(record: Mapping[str, Any]) -> float | None:
    """Return the accuracy of a record's evaluation; None without one, and where no answer was graded.

    Earlier versions wrote an accuracy of 0 in this case.
    """
    return None if not_graded(record) else value(record, "eval/accuracy")


def not_graded(record: Mapping[str, Any]) -> str:
    """Return "not graded" and why, for a record's evaluation of which no answer was graded; empty for any other."""
    if "eval/accuracy" not in record or value(record, "eval/ungraded") != 1.0:
        return ""
    failure = record.get("eval/failure")
    return told_not_graded(failure if isinstance(failure, str) else "")


def told_not_graded(failure: str) -> str:
    """Return what is said in the place of a score where no answer was graded."""
    return f"not graded{f': {shortened(printable(first_line(failure)))}' if failure else ''}"


def unix_time(text: Any) -> float | None:
    """Return unix seconds of an ISO 8601 time, taken as UTC if it names no zone, or None if it cannot be read."""
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
    """Yield the wanted objects of a file of JSON lines and append the numbers of all other lines to `lost`.

    An incomplete last line, as a kill leaves it, is in neither.
    """
    try:
        with open(path, "rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(LARGEST_LINE)):
                    return
                try:
                    record = parse_json(line, finite=False)  # `value` leaves those out
                except ValueError:
                    record = None
                if isinstance(record, dict) and wanted(record):
                    yield record
                elif line.endswith(b"\n") or not line.startswith(b"{"):
                    lost.append(number)
    except FileNotFoundError:
        return
    except OSError:
        lost.append(1)


def _experts(raw: Mapping[str, Any]) -> tuple[int, dict[int, list[int]]] | None:
    """Return the step and the tokens of each expert by layer, or None where that is not what the file holds."""
    layers, step = raw.get("layers"), raw.get("step")
    if not isinstance(layers, dict) or not layers or not _is_step(step):
        return None
    found = {}
    for name, row in layers.items():
        if not (name.isdecimal() and isinstance(row, list) and row and all(map(_is_step, row))):
            return None
        found[int(name)] = row
    return int(step or 0), dict(sorted(found.items()))


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (ValueError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_yaml(path: Path) -> bool:
    try:
        return isinstance(yaml_text.read(path.read_text("utf-8")), dict)
    except (OSError, ValueError):
        return False


def _config(run: RunDir) -> Config | None:
    for read in (run.load_config, lambda: loader.load(run.config, [])):
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
        # A killed attempt could not record its end; it ran at least until its last record.
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
