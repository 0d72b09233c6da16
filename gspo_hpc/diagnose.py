"""``gspo-hpc diagnose``: what is wrong or slow in a run, with evidence, and which setting to change.

Floor 6. Gathers the evidence from a run directory in whatever state it is (finished, running, killed, half copied),
lets every symptom look at it, and makes the page. What cannot be read is no evidence; nothing in the directory is
changed.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from gspo_hpc import config_file, report_data, status, symptoms_end, symptoms_errors, symptoms_learning, symptoms_speed
from gspo_hpc.config import Config
from gspo_hpc.plan_page import paint
from gspo_hpc.report_data import RunData, value
from gspo_hpc.rundir import RunDir
from gspo_hpc.symptoms import ENOUGH, AttemptEvidence, Evidence, Finder, Symptom, Told, found_in, middle
from gspo_hpc.symptoms_speed import COMMUNICATION, DEVICE_USE

FINDERS: tuple[Finder, ...] = (
    *symptoms_errors.FINDERS,
    *symptoms_end.FINDERS,
    *symptoms_learning.FINDERS,
    *symptoms_speed.FINDERS,
)
_ORDER = {"problem": 0, "warning": 1, "note": 2}
_COLOURS = {"problem": "31", "warning": "33", "note": "36"}

# Of a run with thousands of ranks and hundreds of attempts not everything is read: the newest attempts, of these the
# logs that ended first, and their ends.
_ATTEMPTS, _LOGS, _TAIL, _HEAD, _LINES = 5, 64, 2**18, 2**18, 50
_TROUBLE = re.compile(
    "|".join(
        f"(?:{pattern.pattern})"
        for pattern in (
            symptoms_errors.CUDA_MEMORY,
            symptoms_errors.HOST_MEMORY,
            symptoms_errors.NCCL_FAULT,
            symptoms_errors.TENSOR_PARALLEL,
            symptoms_errors.VERSIONS,
            symptoms_errors.MIG,
            symptoms_errors.DUPLICATE_GPU,
            symptoms_errors.DEVICE_COUNT,
            symptoms_errors.ENGINE_DEATH,
            symptoms_errors.DISK,
        )
    ),
    re.IGNORECASE,
)
_JOB_TROUBLE = re.compile(f"{symptoms_errors.CHANGED.pattern}|{symptoms_errors.GIVES_UP.pattern}|no answer from ")
_DEVICE = re.compile(r"^device: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A number that a run is to reach, and what it has; None where it was not measured."""

    name: str
    measured: float | None
    target: float
    above: bool  # whether it is to be above the target, not below

    @property
    def met(self) -> bool | None:
        """None where it was not measured."""
        return None if self.measured is None else (self.measured > self.target) is self.above


@dataclass(frozen=True)
class Diagnosis:
    """What was found, worst first."""

    evidence: Evidence
    max_steps: int | None
    symptoms: tuple[Symptom, ...]
    targets: tuple[Target, ...]

    @property
    def problems(self) -> int:
        """Symptoms that are problems."""
        return sum(symptom.severity == "problem" for symptom in self.symptoms)

    def to_json(self) -> dict[str, Any]:
        """For --json. The keys are documented in docs/diagnose.md."""
        return {
            "run": self.evidence.path,
            "state": self.evidence.state,
            "step": self.evidence.steps,
            "max_steps": self.max_steps,
            "attempts": len(self.evidence.attempts),
            "problems": self.problems,
            "symptoms": [symptom.to_json() for symptom in self.symptoms],
            "targets": {
                one.name: {"measured": one.measured, "target": one.target, "met": one.met} for one in self.targets
            },
        }


def diagnose(path: Path) -> Diagnosis:
    """Everything that a run directory shows. Raises ValueError where there is none, with the nearest that is one."""
    evidence, max_steps = gather(path)
    found = sorted(found_in(evidence, FINDERS), key=lambda symptom: _ORDER[symptom.severity])
    targets = (
        Target("device_use", _typical(evidence, "device_use"), DEVICE_USE, above=True),
        Target(
            "communication_over_computation",
            _typical(evidence, "communication_over_computation"),
            COMMUNICATION,
            above=False,
        ),
    )
    return Diagnosis(evidence, max_steps, tuple(found), targets)


def gather(path: Path) -> tuple[Evidence, int | None]:
    """What the symptoms look at, and the step the run ends at."""
    try:
        data = report_data.read_run(path)
    except ValueError as error:
        raise ValueError(f"{error}{_nearest(path)}") from None
    config = data.config or _known_part(RunDir(path))
    records = tuple(data.train_records)
    run = RunDir(path)
    attempts = tuple(_attempt(run, data, number, raw) for number, raw in _raw_attempts(run, data))
    evidence = Evidence(
        path=str(path),
        config=config,
        records=records,
        attempts=attempts,
        job_said=tuple(Told(_below(run, log), line) for log in _newest_job(run) for line in _job_lines(log)),
        seconds_since_step=_silence(data),
        damaged=data.damaged,
    )
    return evidence, data.max_steps


def page(found: Diagnosis) -> Iterator[str]:
    """The lines for a person."""
    run = found.evidence
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    counts = {kind: sum(s.severity == kind for s in found.symptoms) for kind in _ORDER}
    told = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n) or "nothing found"
    worst = next((kind for kind, n in counts.items() if n), None)
    total = "" if found.max_steps is None else f" of {found.max_steps}"
    yield (
        f"{paint('diagnosis', '1', sys.stdout)} of {run.path}: "
        f"{paint(told, _COLOURS[worst] if worst else '32', sys.stdout)} "
        f"({run.state}, step {run.steps}{total}, {len(run.attempts)} attempt{'s' * (len(run.attempts) != 1)})"
    )
    for symptom in found.symptoms:
        yield ""
        severity = paint(symptom.severity, _COLOURS[symptom.severity], sys.stdout)
        yield f"{severity}  {paint(symptom.name, '1', sys.stdout)}"
        for text in symptom.evidence:
            yield from _item("seen", text, width)
        yield from _item("cause", symptom.cause, width)
        if symptom.settings:
            resumable = "" if symptom.restarts else "   (in another run: some of these may not change in this one)"
            yield from _item("set", " or ".join(symptom.settings) + resumable, width)
        for text in symptom.look:
            yield from _item("look at", text, width)
    if 0 < len(run.records) < ENOUGH:
        yield ""
        yield f"{len(run.records)} step{'s' * (len(run.records) > 1)}: too few to say how it learns and what is slow"
    if any(target.measured is not None for target in found.targets):
        yield ""
        yield paint("targets", "1", sys.stdout)
    for target in found.targets:
        if target.measured is not None:
            side, verdict = ("above" if target.above else "below"), ("met" if target.met else "missed")
            yield f"  {target.name:<30}  {target.measured:.2f}   {side} {target.target:g}: {verdict}"


def _item(head: str, text: str, width: int) -> Iterator[str]:
    lines = textwrap.wrap(text, max(40, width - 11), break_long_words=False, break_on_hyphens=False) or [""]
    yield f"  {head:<8} {lines[0]}"
    yield from (f"{'':<11}{line}" for line in lines[1:])


def _typical(evidence: Evidence, key: str) -> float | None:
    points = evidence.points(key, evidence.computed)
    return middle(points) if len(points) >= ENOUGH else None


def _nearest(path: Path) -> str:
    """The run directories that a wrong path may have meant."""
    within = status.runs_below(path)
    if within:
        return f"; runs in it: {', '.join(map(str, within[:3]))}{', ...' if len(within) > 3 else ''}"
    beside = {run.name: run for run in status.runs_below(path.parent)}
    above = {run.name: run for run in status.runs_below(path.parent.parent)} if path.parent != path else {}
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
    if near:
        return f"; nearest: {beside[near[0]]}"
    if path.parent.name in above:
        return f"; nearest: {path.parent}"
    return ""


def _known_part(run: RunDir) -> Config:
    """What can be read of a config that another version of this package wrote; defaults for the rest."""
    for path in (*sorted(run.path.glob("attempts/*/config.yaml"), reverse=True), run.config):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            raw = yaml.safe_load(path.read_text("utf-8"))
            known = {one.name: {key.name for key in fields(getattr(Config(), one.name))} for one in fields(Config)}
            kept = {
                name: {key: value for key, value in raw[name].items() if key in known[name]}
                for name in raw
                if name in known and isinstance(raw[name], dict)
            }
            return config_file.from_dict(kept)
    return Config()


def _raw_attempts(run: RunDir, data: RunData) -> list[tuple[int, dict[str, Any]]]:
    """attempt.json of every attempt that can be read, by its number, the reason always given."""
    raw = {int(one["attempt"]): one for one in report_data.read_attempts(run)[0]}
    return [(number, one | {"reason": str(one.get("reason", "unknown"))}) for number, one in sorted(raw.items())]


def _attempt(run: RunDir, data: RunData, number: int, raw: dict[str, Any]) -> AttemptEvidence:
    own = [record["step"] for record in data.train_records if record.get("attempt") == number]
    restarted = any(value(r, "engine_restarts") for r in data.train_records if r.get("attempt") == number)
    failed = raw["reason"] in ("failed", "refused", "killed")
    newest = number > max((one.number for one in data.attempts), default=0) - _ATTEMPTS
    folder = run.attempt(number).path
    logs = _logs(folder) if newest else []
    read = [*logs, folder / "srun.log"] if newest else []
    reached, job = raw.get("reached"), raw.get("slurm_job_id")
    return AttemptEvidence(
        number=number,
        reason=raw["reason"],
        detail=str(raw.get("detail") or ""),
        exit_code=raw.get("exit_code"),
        where=f"{raw.get('host', '')}{f', job {job}' if job else ''}",
        reached=(int(reached[0]), int(reached[1])) if isinstance(reached, list) and len(reached) == 2 else None,
        steps=(own[0], own[-1]) if own else None,
        versions={str(k): str(v) for k, v in (raw.get("versions") or {}).items()},
        error=_error(run, number) if failed and newest else None,
        said=tuple(_said(run, read)) if failed or restarted else (),
        devices=tuple(dict.fromkeys(name for log in logs for name in _DEVICE.findall(_read(log, _HEAD, end=False)))),
    )


def _error(run: RunDir, number: int) -> Told | None:
    """The traceback that the others follow from, as `logs --errors` shows it."""
    try:
        log, text = status.first_error(run.path, number)
    except (ValueError, OSError, KeyError):
        return None
    return Told(_below(run, log), text)


def _logs(folder: Path) -> list[Path]:
    """The logs of an attempt's ranks, those that ended first before the others."""
    found = [(log.stat().st_mtime_ns, log) for log in folder.glob("rank-*.log")]
    return [log for _, log in sorted(found)[:_LOGS]]


def _said(run: RunDir, logs: Sequence[Path]) -> Iterator[Told]:
    """Lines that speak of trouble, of each log at most so many."""
    for log in logs:
        lines = [line for line in _read(log, _TAIL, end=True).splitlines() if _TROUBLE.search(line)]
        yield from (Told(_below(run, log), line[:1000]) for line in lines[:_LINES])


def _job_lines(log: Path) -> Iterator[str]:
    """What the supervisor refused or gave up, with the lines that follow it."""
    lines = _read(log, _TAIL, end=True).splitlines()
    for at, line in enumerate(lines):
        if _JOB_TROUBLE.search(line):
            more = [after for after in lines[at + 1 : at + 4] if after.startswith("  ")]
            yield " ".join([line.removeprefix("gspo-hpc: "), *(text.strip() for text in more)])


def _newest_job(run: RunDir) -> list[Path]:
    """Its logs: what was refused before it is mended."""
    jobs = sorted(run.path.glob("jobs/*/*_log.out"))
    return [log for log in jobs if log.parent == jobs[-1].parent]


def _read(log: Path, size: int, *, end: bool) -> str:
    """The first or the last bytes of a log; nothing where it cannot be read."""
    try:
        with log.open("rb") as file:
            if end:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def _below(run: RunDir, path: Path) -> str:
    return os.path.relpath(path, run.path)


def _silence(data: RunData) -> float | None:
    """Seconds since the newest step of a run that is running."""
    times = [found for record in data.records if (found := value(record, "time")) is not None]
    return max(0.0, time.time() - max(times)) if times and data.state == "running" else None
