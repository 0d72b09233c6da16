"""Diagnose a run: gather the evidence from its directory, and find the symptoms that it shows.

The run may be finished, running, killed or half copied. What cannot be read is no evidence; nothing in the directory
changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader, plugins, yaml_text
from gspo_hpc.config.schema import Config
from gspo_hpc.diagnose import registry
from gspo_hpc.diagnose.evidence import ENOUGH, AttemptEvidence, Evidence, Excerpt, middle
from gspo_hpc.diagnose.registry import Symptom
from gspo_hpc.diagnose.symptoms.speed import COMMUNICATION, DEVICE_USE
from gspo_hpc.launch import status
from gspo_hpc.models import architecture
from gspo_hpc.planning import trained
from gspo_hpc.planning.estimates import adapters, parameters
from gspo_hpc.runs import distillation, learning, reader
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_logs
from gspo_hpc.runs.reader import RunData, value
from gspo_hpc.system.text import near_miss, tail

# A run may have thousands of ranks and hundreds of attempts: read only the newest attempts, of these the logs that
# ended first, and of these their beginnings and ends.
_ATTEMPTS, _LOGS, _TAIL, _HEAD, _LINES = 5, 64, 2**18, 2**18, 50
GRADIENT_VARIANCE = 1e-4
_REWARD_FAILED = re.compile(r"a reward function failed for (\d+) completions?: (.+)$", re.MULTILINE)  # on the console
_DEVICE = re.compile(r"^device: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A number that a run should reach, and what it has; None if that was not measured."""

    name: str
    measured: float | None
    target: float
    above: bool  # whether it should be above the target, not below
    lacking: str | None = None  # what it takes to measure it, where the run has steps enough

    @property
    def met(self) -> bool | None:
        """Return whether the run meets the target; None if it was not measured."""
        return None if self.measured is None else (self.measured > self.target) is self.above


@dataclass(frozen=True)
class Diagnosis:
    """The symptoms found in a run, worst first."""

    evidence: Evidence
    max_steps: int | None
    symptoms: tuple[Symptom, ...]
    targets: tuple[Target, ...]

    @property
    def problems(self) -> int:
        """Number of symptoms that are problems."""
        return sum(symptom.severity == "problem" for symptom in self.symptoms)

    def to_json(self) -> dict[str, Any]:
        """Return the object for --json; docs/diagnose.md documents its keys."""
        taught = distillation.of_run(self.evidence.config, self.evidence.records)
        return {
            "run": self.evidence.path,
            "state": self.evidence.state,
            "step": self.evidence.steps,
            "max_steps": self.max_steps,
            "attempts": len(self.evidence.attempts),
            "adapter": trained.adapter(self.evidence.config),
            "teacher": None if taught is None else taught.teacher,
            "divergence": None if taught is None else list(taught.divergences),
            "problems": self.problems,
            "symptoms": [symptom.to_json() for symptom in self.symptoms],
            "targets": {
                one.name: {"measured": one.measured, "target": one.target, "met": one.met, "lacking": one.lacking}
                for one in self.targets
            },
        }


def diagnose(path: Path) -> Diagnosis:
    """Return everything that a run directory shows. Raises ValueError if `path` is none, and names the nearest."""
    evidence, max_steps = gather(path)
    targets = (
        Target("device_use", _typical(evidence, "device_use"), DEVICE_USE, above=True),
        Target(
            "communication_over_computation",
            _typical(evidence, "communication_over_computation"),
            COMMUNICATION,
            above=False,
        ),
        _gradient_variance(evidence),
    )
    return Diagnosis(evidence, max_steps, tuple(registry.find(evidence)), targets)


def gather(path: Path) -> tuple[Evidence, int | None]:
    """Read the evidence from a run directory; also return the step at which the run ends, if known."""
    try:
        data = reader.read_run(path)
    except ValueError as error:
        raise ValueError(f"{error}{_nearest(path)}") from None
    run = RunDir(path)
    symptoms = registry.registered()
    lines = _any(one.lines for one in symptoms)
    job_lines = _any(one.job_lines for one in symptoms)
    evidence = Evidence(
        path=str(path),
        config=data.config or _known_part(run),
        records=tuple(data.train_records),
        attempts=tuple(_attempt(run, data, number, raw, lines) for number, raw in _raw_attempts(run)),
        job_excerpts=tuple(
            Excerpt(_below(run, log), line) for log in _newest_job(run) for line in _job_lines(log, job_lines)
        ),
        seconds_since_step=_silence(data),
        reward_failures=_reward_failures(run, data),
        learning=learning.judge(data.records),
        damaged=data.damaged,
    )
    return evidence, data.max_steps


def _any(patterns: Iterator[re.Pattern[str] | None]) -> re.Pattern[str]:
    """Join patterns to one that matches where any of them does, whatever the case of letters."""
    texts = dict.fromkeys(pattern.pattern for pattern in patterns if pattern is not None)
    return re.compile("|".join(f"(?:{text})" for text in texts) or r"(?!)", re.IGNORECASE)


def _typical(evidence: Evidence, key: str) -> float | None:
    points = evidence.points(key, evidence.computed)
    return middle(points) if len(points) >= ENOUGH else None


def _gradient_variance(evidence: Evidence) -> Target:
    """Return the mean square of a gradient's elements, which are near zero on average."""
    points, config = evidence.points("grad_norm", evidence.computed), evidence.config
    measured, lacking = None, None
    if len(points) >= ENOUGH:
        arch, path = architecture.find(config), config.model.path
        if arch is not None:
            count = adapters.of_model(arch, config) or parameters.parameters(arch)  # of what is trained
            measured = middle(points) ** 2 / count
        elif path is None:
            lacking = "the run's config does not name its model"
        elif (Path(path) / "config.json").is_file():
            lacking = f"{path}/config.json does not give the sizes of the model"
        elif os.path.isabs(path):
            lacking = f"model.path {path} is not on this machine, so the number of parameters is not known"
        else:
            lacking = (
                f"model.path {path} is not found from here, so the number of parameters is not known; give this "
                "command in the folder in which the run was started"
            )
    return Target("gradient_variance", measured, GRADIENT_VARIANCE, above=False, lacking=lacking)


def _nearest(path: Path) -> str:
    """Name the run directories that a wrong path may have meant."""
    within = status.runs_below(path)
    if within:
        return f"; it contains the runs {', '.join(map(str, within[:3]))}{', ...' if len(within) > 3 else ''}"
    beside = {run.name: run for run in status.runs_below(path.parent)}
    above = {run.name: run for run in status.runs_below(path.parent.parent)} if path.parent != path else {}
    hint = near_miss(path.name, beside, shown=beside.__getitem__, cutoff=0.4)
    return f"; nearest: {path.parent}" if not hint and path.parent.name in above else hint


def _known_part(run: RunDir) -> Config:
    """Return what can be read of a config that another version of this package wrote, with defaults for the rest."""
    for path in (*sorted(run.path.glob("attempts/*/config.yaml"), reverse=True), run.config):
        with contextlib.suppress(OSError, ValueError):
            raw = yaml_text.read(path.read_text("utf-8"))
            known = {name: {*type(section).model_fields} for name, section in Config()}
            if chosen := plugins.named((raw.get("algorithm") or {}).get("name")):
                known["algorithm"] = {*chosen.model_fields}
            kept = {
                name: {key: value for key, value in raw[name].items() if key in known[name]}
                for name in raw
                if name in known and isinstance(raw[name], dict)
            }
            return loader.from_dict(kept)
    return Config()


def _raw_attempts(run: RunDir) -> list[tuple[int, dict[str, Any]]]:
    """Return attempt.json of every readable attempt by its number; the reason is always set."""
    raw = {int(one["attempt"]): one for one in reader.read_attempts(run)[0]}
    return [(number, one | {"reason": str(one.get("reason", "unknown"))}) for number, one in sorted(raw.items())]


def _attempt(run: RunDir, data: RunData, number: int, raw: dict[str, Any], lines: re.Pattern[str]) -> AttemptEvidence:
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
        excerpts=tuple(_excerpts(run, read, lines)) if failed or restarted else (),
        devices=tuple(dict.fromkeys(name for log in logs for name in _DEVICE.findall(_read(log, _HEAD, end=False)))),
    )


def _error(run: RunDir, number: int) -> Excerpt | None:
    """Return the traceback that the others follow from, as `logs --errors` shows it."""
    try:
        found = status.first_error(run.path, number)
    except (ValueError, OSError, KeyError):
        return None
    return None if found is None else Excerpt(_below(run, found[0]), found[1])


def _logs(folder: Path) -> list[Path]:
    """Return the logs of an attempt's ranks, those that ended first before the others."""
    found = [(log.stat().st_mtime_ns, log) for log in folder.glob("rank-*.log")]
    return [log for _, log in sorted(found)[:_LOGS]]


def _excerpts(run: RunDir, logs: Sequence[Path], pattern: re.Pattern[str]) -> Iterator[Excerpt]:
    """Yield the lines that match, at most a fixed number of each log."""
    for log in logs:
        lines = [line for line in _read(log, _TAIL, end=True).splitlines() if pattern.search(line)]
        yield from (Excerpt(_below(run, log), line[:1000]) for line in lines[:_LINES])


def _job_lines(log: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the supervisor's lines that match, with the indented lines that follow them."""
    lines = _read(log, _TAIL, end=True).splitlines()
    for at, line in enumerate(lines):
        if pattern.search(line):
            more = [after for after in lines[at + 1 : at + 4] if after.startswith("  ")]
            yield " ".join([line.removeprefix("gspo-hpc: "), *(text.strip() for text in more)])


def _reward_failures(run: RunDir, data: RunData) -> dict[str, int]:
    """Return how reward functions failed: as the newest console counts them, else as samples have them."""
    told: Counter[str] = Counter()
    for one in reversed(data.attempts):
        for count, text in _REWARD_FAILED.findall(_read(run.attempt(one.number).console, _TAIL, end=True)):
            told[text] += int(count)
        if told:
            return dict(told)
    return dict(Counter(str(row["failure"]) for row in data.samples if row.get("failure")))


def _newest_job(run: RunDir) -> list[Path]:
    """Return the logs of the newest Slurm job: what an older one refused may be fixed by now."""
    jobs = job_logs(run)
    return [log for log in jobs if log.parent == jobs[-1].parent]


def _read(log: Path, size: int, *, end: bool) -> str:
    """Return the first or the last bytes of a log, or nothing if it cannot be read."""
    try:
        if end:
            return tail(log, size)
        with log.open("rb") as file:
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def _below(run: RunDir, path: Path) -> str:
    return os.path.relpath(path, run.path)


def _silence(data: RunData) -> float | None:
    """Return the seconds since the newest step of a run that is running."""
    times = [found for record in data.records if (found := value(record, "time")) is not None]
    return max(0.0, time.time() - max(times)) if times and data.state == "running" else None
