"""``gspo-hpc status``, ``logs`` and ``cancel``: what a run does, said and how to end it, with Slurm or without.

Floor 6. All of it is read from the run directory; Slurm adds where its job stands, and need not answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_hpc import slurm_commands, srun
from gspo_hpc.durable import write_atomically
from gspo_hpc.rundir import RunDir
from gspo_hpc.slurm_commands import Job, SlurmError
from gspo_hpc.submit import job_ids
from gspo_hpc.verdict import AFTERMATH

_RECENT = 8  # steps that the speed is averaged over
_TAIL = 2**20  # bytes of a log that are searched for a traceback
_CANCEL_SECONDS = 300.0


@dataclass(frozen=True)
class Status:
    """A run at a glance. Times in seconds; None where it is not known."""

    run: str
    state: str  # running, waiting, done, stopped, failed, new ...
    reason: str  # Slurm's reason for waiting, or why the last attempt ended
    job_id: str | None
    nodes: str
    step: int
    max_steps: int | None
    reward: float | None
    tokens_per_s: float | None
    seconds_left_in_job: float | None
    seconds_left_in_run: float | None
    attempts: int
    ended: dict[str, int]  # why attempts ended -> how many

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def runs_below(folder: Path) -> list[Path]:
    """The run directories directly in a folder."""
    return sorted(path.parent for path in folder.glob("*/run.json")) if folder.is_dir() else []


def read(path: Path) -> Status:
    """The state of a run. Raises ValueError where there is none."""
    run = RunDir(path)
    run.read_info()
    attempts = run.read_attempts()
    records = [record for record in run.read_metrics() if record["step"] > 0]
    max_steps = run.load_config().run.max_steps
    job = _job(run)
    step = int(records[-1]["step"]) if records else 0
    state, reason = _state(job, attempts, step, max_steps)
    last = records[-1] if records else {}
    recent = [record["seconds"] for record in records[-_RECENT:] if record.get("seconds") is not None]
    left = (max_steps or 0) - step
    per_step = sum(recent) / len(recent) if recent else None
    end = job.end_time if job is not None and job.state == "RUNNING" else None
    return Status(
        run=str(path),
        state=state,
        reason=reason,
        job_id=job.id if job is not None else None,
        nodes=job.nodes if job is not None else next((a.get("host", "") for a in reversed(attempts)), ""),
        step=step,
        max_steps=max_steps,
        reward=last.get("reward"),
        tokens_per_s=last.get("completion_tokens_per_s"),
        seconds_left_in_job=None if end is None else max(0.0, end - time.time()),
        seconds_left_in_run=None if per_step is None else per_step * max(0, left),
        attempts=len(attempts),
        ended=dict(Counter(a["reason"] for a in attempts if a["reason"] != "running")),
    )


def lines(status: Status) -> Iterator[str]:
    """A few lines for a person."""
    total = "" if status.max_steps is None else f" of {status.max_steps}"
    yield f"{status.run}: {status.state}" + (f" ({status.reason})" if status.reason else "")
    reward = "" if status.reward is None else f", reward {status.reward:.3f}"
    speed = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} tokens/s"
    yield f"  step {status.step}{total}{reward}{speed}"
    if status.job_id is not None:
        left = "" if status.seconds_left_in_job is None else f", {span(status.seconds_left_in_job)} left in the job"
        yield f"  job {status.job_id}{f' on {status.nodes}' if status.nodes else ''}{left}"
    if status.seconds_left_in_run and status.state != "done":
        yield f"  {span(status.seconds_left_in_run)} left in the run"
    ended = ", ".join(f"{count} {reason}" for reason, count in status.ended.items())
    yield f"  {status.attempts} attempt{'' if status.attempts == 1 else 's'}" + (f": {ended}" if ended else "")


def lift_hold(path: Path) -> bool:
    """Let a requeued job that only waits for its time start now, where the user may; whether that was done."""
    with contextlib.suppress(SlurmError):
        job = _job(RunDir(path))
        if job is not None and job.state == "PENDING" and job.reason == "BeginTime" and job.restarts:
            slurm_commands.start_soon(job.id)
            return True
    return False


def log_path(path: Path, rank: int | None, attempt: int | None) -> Path:
    """The log to show: of one rank, or, with no rank named, what rank 0 tells people: the log of the Slurm job that
    the attempt was in. Raises ValueError where there is none."""
    run = RunDir(path)
    run.read_info()
    attempts = run.read_attempts()
    if not attempts:
        jobs = sorted(run.path.glob("jobs/*/*_log.out"))
        if not jobs:
            raise ValueError(f"{run.path} has not been started yet")
        return jobs[-1]
    numbers = [record["attempt"] for record in attempts]
    chosen = numbers[-1] if attempt is None else attempt
    if chosen not in numbers:
        raise ValueError(f"{run.path} has no attempt {chosen}; there are 1 to {numbers[-1]}")
    record = attempts[numbers.index(chosen)]
    jobs = sorted(run.path.glob(f"jobs/*/{record.get('slurm_job_id')}_0_log.out"))
    if rank is None and jobs:
        return jobs[-1]
    log = run.attempt(chosen).log_path(rank or 0)
    if not log.exists():
        ranks = sorted(int(p.stem.removeprefix("rank-")) for p in log.parent.glob("rank-*.log"))
        which = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "none"
        raise ValueError(f"attempt {chosen} has no log of rank {rank or 0}; there are {which}")
    return log


def follow(path: Path, *, forever: bool, done: Callable[[], bool]) -> Iterator[str]:
    """The text of a log; with `forever` also what is added to it until `done`."""
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            if text := log.read(65536):
                yield text
            elif not forever or done():
                return
            else:
                time.sleep(0.5)


def first_error(path: Path, attempt: int | None = None) -> tuple[Path, str]:
    """The log and the text of the traceback that the others follow from: of the rank that stopped writing first, errors
    that are only about another rank having gone left out. Of an attempt that was ended for a rank that hung, the stacks
    of that rank. Raises ValueError where no rank told of an error."""
    run = RunDir(path)
    run.read_info()
    details = {record["attempt"]: record.get("detail") or "" for record in run.read_attempts()}
    for number in [attempt] if attempt is not None else reversed(details):
        found = []
        for log in run.attempt(number).path.glob("rank-*.log"):
            if (text := _traceback(log)) is not None:
                what = text.rstrip().splitlines()[-1]
                found.append((AFTERMATH.search(what) is not None, log.stat().st_mtime_ns, log, text))
        if found:
            _, _, log, text = min(found, key=lambda item: item[:2])
            return log, text
        if stacks := [path for path in run.attempt(number).path.glob("rank-*.stacks") if path.stat().st_size]:
            named = re.search(r"rank (\d+) on", details.get(number, ""))
            blamed = run.attempt(number).stacks_path(int(named.group(1)) if named else 0)
            path = blamed if blamed in stacks else min(stacks)
            return path, path.read_text("utf-8", "replace")
    raise ValueError(f"{run.path}: no traceback in the log of any rank")


def cancel(path: Path, say: Callable[[str], None]) -> None:
    """End a run for good: one that runs saves before. Raises ValueError where nothing runs or waits."""
    run = RunDir(path)
    run.read_info()
    job = _job(run)
    if job is not None and job.active:
        if job.state != "RUNNING":
            slurm_commands.cancel(job.id)
            say(f"job {job.id} is cancelled; it had not been running")
            return
        folder = next(p.parent for p in sorted((run.path / "jobs").glob(f"*/{job.id}_submission.sh")))
        write_atomically(folder / srun.CANCEL, "")
        say(f"job {job.id} stops at its next safe point and saves")
        deadline = time.monotonic() + _CANCEL_SECONDS
        while (now := slurm_commands.job(job.id)) is not None and now.state in ("RUNNING", "COMPLETING"):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"job {job.id} still runs after {_CANCEL_SECONDS:.0f} s; scancel {job.id} ends it unsaved"
                )
            time.sleep(0.5)
        say(f"job {job.id} has ended")
        return
    holder = run.holder()
    if holder is None:
        raise ValueError(f"{run.path} neither runs nor waits")
    if holder.get("host") != socket.gethostname():
        raise ValueError(f"{run.path} runs on {holder.get('host')}, process {holder.get('pid')}: cancel it there")
    os.kill(int(holder["pid"]), signal.SIGTERM)
    say(f"process {holder['pid']} stops at its next safe point and saves")


def span(seconds: float) -> str:
    """1d 2h, 3h 4m, 5m 6s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s"


def now() -> str:
    """The time of day, for --watch."""
    return datetime.now(UTC).astimezone().strftime("%H:%M:%S")


def _job(run: RunDir) -> Job | None:
    """The newest job of a run, if Slurm is here and still knows it."""
    ids = job_ids(run)
    if not ids:
        return None
    try:
        return slurm_commands.job(ids[-1], patience=2.0)
    except SlurmError:
        return None


def _state(job: Job | None, attempts: list[dict[str, Any]], step: int, max_steps: int | None) -> tuple[str, str]:
    last = attempts[-1] if attempts else None
    if job is not None and job.active:
        if job.state == "RUNNING":
            return ("running", "") if last and last["reason"] == "running" else ("starting", "")
        return ("waiting", job.reason) if job.state == "PENDING" else (job.state.lower(), job.reason)
    if last is None:
        return "new", ""
    if last["reason"] == "running":
        return "running", ""
    if last["reason"] == "done" or (max_steps is not None and step >= max_steps):
        return "done", ""
    told = last.get("detail") or ""
    return last["reason"], told


def _traceback(log: Path) -> str | None:
    """The last traceback of a log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        text = file.read().decode("utf-8", "replace")
    start = text.rfind("Traceback (most recent call last)")
    if start < 0:
        return None
    kept: list[str] = []
    for line in text[start:].splitlines():
        kept.append(line)
        if len(kept) > 1 and line and not line[0].isspace():
            break
    return "\n".join(kept) + "\n"
