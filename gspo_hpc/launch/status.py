"""Read the state and the logs of a run from its directory, and cancel it, with Slurm or without.

Slurm adds the state of the run's job, and need not answer.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.derived import trains_adapters
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import further_jobs, waiting
from gspo_hpc.launch.failures import Failure, first_failure
from gspo_hpc.launch.slurm import commands, srun
from gspo_hpc.launch.slurm.commands import Job, SlurmError
from gspo_hpc.planning import exactness
from gspo_hpc.runs import reader, spending
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_folder, job_ids, job_logs
from gspo_hpc.runs.sweep import SweepDir, expand
from gspo_hpc.system.files import write_atomically
from gspo_hpc.system.text import last_traceback, tail

if TYPE_CHECKING:
    from gspo_hpc.runs.distillation import Distillation

_RECENT = 8  # steps that the speed is averaged over
_TAIL = 2**20  # bytes of a log that are searched for a traceback
_CANCEL_SECONDS = 300.0
ENDED = ("done", "failed", "refused", "cancelled", "killed", "stopped", "damaged")


@dataclass(frozen=True)
class Status:
    """The state of a run at a glance. Times are in seconds; None means not known."""

    run: str
    state: str  # running, waiting, done, stopped, failed, new, damaged ...
    waits_for: str  # Slurm, nodes, the start of ranks, a rollout or a step; empty if nothing goes on
    reason: str  # Slurm's reason for waiting, why the last attempt ended, or the damaged file and what is wrong with it
    job_id: str | None
    nodes: str
    step: int
    max_steps: int | None
    reward: float | None
    accuracy: float | None  # on unseen prompts, of the latest evaluation
    not_graded: str  # "not graded" and why, if no answer of the latest evaluation was graded; else empty
    learnt: str | None  # of a run that is over: "learnt", "doubtful", "lost" or "nothing"; None before its first step
    worry: str  # what is wrong with what a run that is over has learnt; empty if nothing is
    seconds_spent: float  # in the steps so far, evaluations and saves included
    seconds_since_step: float | None  # since the latest step was logged, while the run goes on
    tokens_per_s: float | None
    seconds_left_in_job: float | None
    seconds_left_in_run: float | None
    attempts: int
    adapter: str | None  # what of the model is trained, in words; None: all of it
    teacher: str | None  # the model that a run distils from (algorithm.teacher); None without one
    divergence: float | None  # from the teacher over the latest rollouts, in nats a token
    distils: str  # the teacher, its part in what is learnt and how the divergence went, in words; empty without one
    judges: str  # what was asked of judges, and of what budget, in words; empty if nothing was
    exactness: str | None  # bitwise, journal-exact or checkpoint-exact (docs/exactness.md)
    exactness_settings: list[str]  # key=value that raise it
    exactness_cost: str  # of these, or of what has raised it; may be empty
    ended: dict[str, int]  # why attempts ended -> how many
    served: list[dict[str, Any]]  # jobs that serve a checkpoint: job_id, state, node, address, name, log
    evaluating: list[dict[str, Any]]  # jobs that evaluate a checkpoint: job_id, state, node, step, out, log

    @property
    def is_over(self) -> bool:
        """True if nothing goes on with the run by itself."""
        return self.state in ENDED

    @property
    def shown(self) -> str:
        """The state for people: a run that taught its model nothing does not look well."""
        if not self.worry:
            return self.state
        return f"{self.state}, {'learnt nothing' if self.learnt == 'nothing' else 'in doubt'}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, for --json."""
        return asdict(self)


def runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder, sorted by name; for a sweep there, those of its runs."""
    if not folder.is_dir():
        return []
    there = [path.parent for name in ("run.json", "sweep.json") for path in folder.glob(f"*/{name}")]
    return expand(sorted(there))


def _existing(path: Path) -> RunDir:
    """Return the run directory at `path`, whatever is damaged in it. Raises ValueError if it is none."""
    run = RunDir(path)
    if not run.info.exists():
        run.read_info()
    return run


def read(path: Path) -> Status:
    """Return the state of a run, "damaged" where a file of it cannot be used.

    Raises ValueError if `path` is not a run directory. Of metrics.jsonl, what can be read is shown.
    """
    run = _existing(path)
    damage: list[str] = []
    with _noting(damage):
        run.read_info()
    with _noting(damage):
        run.read_attempts()
    attempts, _ = reader.read_attempts(run)
    logged = reader.read_records(run)
    records = [record for record in logged if record["step"] > 0]
    max_steps, found, adapter, taught, asked = None, None, None, None, ""
    with _noting(damage):
        config = run.load_config()
        if (account := spending.read(run.spending)) is not None:
            asked = spending.words(account, config.judges)
        max_steps, found, adapter = config.run.max_steps, exactness.assess(config), _adapter(config)
        taught = _taught(config, records)
    job: Job | None = None
    with _noting(damage):
        job = _job(run)
    step = int(records[-1]["step"]) if records else 0
    state, reason = ("damaged", damage[0]) if damage else _state(job, attempts, step, max_steps)
    last = records[-1] if records else {}
    evaluated: dict[str, Any] = next((record for record in reversed(logged) if "eval/accuracy" in record), {})
    when = reader.value(last, "time") if state == "running" else None
    seconds = [reader.value(record, "seconds") for record in records[-_RECENT:]]
    recent = [one for one in seconds if one is not None]
    learnt = None
    if state in ENDED:
        from gspo_hpc.runs import learning  # only here: a run that goes on is not judged

        learnt = learning.judge(logged)
    left = (max_steps or 0) - step
    per_step = sum(recent) / len(recent) if recent else None
    end = job.end_time if job is not None and job.state == "RUNNING" else None
    return Status(
        run=str(path),
        state=state,
        waits_for=_waits_for(run, state, job, records),
        reason=reason,
        job_id=job.id if job is not None else None,
        nodes=job.nodes if job is not None else next((str(a.get("host", "")) for a in reversed(attempts)), ""),
        step=step,
        max_steps=max_steps,
        reward=reader.value(last, "reward"),
        accuracy=reader.accuracy(evaluated),
        not_graded=reader.not_graded(evaluated),
        learnt=None if learnt is None else learnt.grade,
        worry=learnt.worry if learnt is not None and (state == "done" or learnt.nothing) else "",
        seconds_spent=sum(reader.value(record, "seconds") or 0.0 for record in records),
        seconds_since_step=None if when is None else max(0.0, time.time() - when),
        tokens_per_s=reader.value(last, "completion_tokens_per_s"),
        seconds_left_in_job=None if end is None else max(0.0, end - time.time()),
        seconds_left_in_run=None if per_step is None else per_step * max(0, left),
        attempts=len(attempts),
        adapter=adapter,
        teacher=None if taught is None else taught.teacher,
        divergence=None if taught is None else taught.latest,
        distils="" if taught is None else taught.words,
        judges=asked,
        exactness=None if found is None else found.grade,
        exactness_settings=[] if found is None else list(found.settings),
        exactness_cost="" if found is None else found.cost,
        ended=dict(Counter(str(a["reason"]) for a in attempts if a["reason"] != "running")),
        served=further_jobs.serving(path),
        evaluating=further_jobs.evaluating(path),
    )


def _taught(config: Config, records: list[dict[str, Any]]) -> Distillation | None:
    if not config.algorithm.has_teacher:
        return None
    from gspo_hpc.runs import distillation  # only here: it judges what was learnt

    return distillation.of_run(config, records)


def _adapter(config: Config) -> str | None:
    if not trains_adapters(config):
        return None
    from gspo_hpc.planning import trained  # only here: the sizes of models come with it

    return trained.adapter(config)


@contextlib.contextmanager
def _noting(damage: list[str]) -> Iterator[None]:
    """Note what makes a file of a run unusable, on one line, and go on."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        damage.append("; ".join(str(error).splitlines()))
    except OSError as error:
        damage.append(f"{error.filename}: {error.strerror}")


def lift_hold(path: Path) -> bool:
    """Let a requeued job that only waits for its begin time start now; return whether Slurm allowed it."""
    with contextlib.suppress(SlurmError, ValueError, OSError):
        job = _job(RunDir(path))
        if job is not None and job.state == "PENDING" and job.reason == "BeginTime" and job.restarts:
            commands.start_soon(job.id)
            return True
    return False


def log_path(path: Path, rank: int | None, attempt: int | None) -> Path:
    """Return the log of a rank, by default what people were shown: the log of the attempt's Slurm job, or its console.

    `attempt`: its number, by default the newest. Raises ValueError if there is no such log.
    """
    run = _existing(path)
    attempts, _ = reader.read_attempts(run)
    if not attempts:
        jobs = job_logs(run)
        if not jobs:
            raise ValueError(f"{run.path} has not been started yet")
        return jobs[-1]
    numbers = [record["attempt"] for record in attempts]
    chosen = numbers[-1] if attempt is None else attempt
    if chosen not in numbers:
        there = "its only attempt is 1" if numbers[-1] == 1 else f"there are 1 to {numbers[-1]}"
        raise ValueError(f"{run.path} has no attempt {chosen}; {there}")
    record = attempts[numbers.index(chosen)]
    jobs = job_logs(run, str(record.get("slurm_job_id")))
    if rank is None and jobs:
        return jobs[-1]
    if rank is None and (console := run.attempt(chosen).console).exists():
        return console
    log = run.attempt(chosen).log_path(rank or 0)
    if not log.exists():
        ranks = list(run.attempt(chosen).logs())
        there = f"only rank {ranks[0]} has one" if len(ranks) == 1 else f"there are ranks {ranks[0]} to {ranks[-1]}"
        raise ValueError(f"attempt {chosen} has no log of rank {rank or 0}; {there if ranks else 'no rank has one'}")
    return log


def follow(path: Path, *, forever: bool, done: Callable[[], bool]) -> Iterator[str]:
    """Yield the text of a log; with `forever`, also what is appended to it until `done` returns True."""
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            if text := log.read(65536):
                yield text
            elif not forever or done():
                return
            else:
                time.sleep(0.5)


def first_error(path: Path, attempt: int | None = None) -> tuple[Path, str] | None:
    """Return the log and the text of the traceback that the other failures of an attempt follow from.

    Without a traceback it is the stacks of the rank that hung, if the attempt was ended for one. Where a rank refused
    the run it is the mistake as the person was told it: where in this package it was found helps nobody. `attempt`: its
    number; by default the newest that has any. Returns None if no rank left any; raises ValueError if `path` is no run.
    """
    run = _existing(path)
    refused = {record["attempt"] for record in reader.read_attempts(run)[0] if record.get("reason") == "refused"}
    details = {record["attempt"]: str(record.get("detail") or "") for record in reader.read_attempts(run)[0]}
    for number in [attempt] if attempt is not None else reversed(details):
        found: dict[int, tuple[Path, str]] = {}
        failures = []
        for rank, log in run.attempt(number).logs().items():
            if (text := last_traceback(tail(log, _TAIL))) is not None:
                if number in refused and details[number]:
                    text = f"{details[number]}\n"
                found[rank] = log, text
                failures.append(Failure(rank, text.rstrip().splitlines()[-1], at=log.stat().st_mtime))
        if failures:
            return found[first_failure(failures).rank]
        if stacks := [path for path in run.attempt(number).path.glob("rank-*.stacks") if path.stat().st_size]:
            named = re.search(r"rank (\d+) on", details.get(number, ""))
            blamed = run.attempt(number).stacks_path(int(named.group(1)) if named else 0)
            path = blamed if blamed in stacks else min(stacks)
            return path, path.read_text("utf-8", "replace")
    return None


def cancel(path: Path, say: Callable[[str], None]) -> None:
    """End a run, or all runs of a sweep, for good; one that is running saves first.

    Raises ValueError if nothing is running or waiting.
    """
    if not SweepDir(path).exists:
        run = _existing(path)
        job = _job(run)
        if job is None or not job.active:
            _stop_process(run, say)
        elif _ask_to_end(run, job, say):
            _wait_for_end(job, say)
        return
    runs = [_existing(run) for run in SweepDir(path).runs()]
    jobs = [(run, job) for run in runs if (job := _job(run)) is not None and job.active]
    if not jobs:
        raise ValueError(f"{path}: none of its runs is running or waiting")
    jobs.sort(key=lambda one: one[1].state == "RUNNING")  # first those that wait: they would begin as others end
    for job in [job for run, job in jobs if _ask_to_end(run, job, say)]:
        _wait_for_end(job, say)


def _ask_to_end(run: RunDir, job: Job, say: Callable[[str], None]) -> bool:
    """Take a job out of the queue, or ask one that runs to save and end; return whether it has to be waited for."""
    if job.state != "RUNNING":
        commands.cancel(job.id)
        say(f"job {job.id} is cancelled; it had not started")
        return False
    write_atomically(job_folder(run, job.id) / srun.CANCEL, "")
    say(f"job {job.id} stops at its next safe point and saves")
    return True


def _wait_for_end(job: Job, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _CANCEL_SECONDS
    while (now := commands.job(job.id)) is not None and now.state in ("RUNNING", "COMPLETING"):
        if time.monotonic() > deadline:
            raise ValueError(
                f"job {job.id} is still running after {_CANCEL_SECONDS:.0f} s; scancel {job.id} ends it unsaved"
            )
        time.sleep(0.5)
    say(f"job {job.id} has ended")


def _stop_process(run: RunDir, say: Callable[[str], None]) -> None:
    holder = run.holder()
    if holder is None:
        raise ValueError(f"{run.path} is neither running nor waiting")
    if holder.get("host") != socket.gethostname():
        raise ValueError(f"{run.path} runs on {holder.get('host')}, process {holder.get('pid')}: cancel it there")
    os.kill(int(holder["pid"]), signal.SIGTERM)
    say(f"process {holder['pid']} stops at its next safe point and saves")


def _job(run: RunDir) -> Job | None:
    """Return the newest job of a run; None if Slurm does not answer or no longer knows it."""
    ids = job_ids(run)
    if not ids:
        return None
    try:
        return commands.job(ids[-1], patience=2.0)
    except SlurmError:
        return None


def _waits_for(run: RunDir, state: str, job: Job | None, records: list[dict[str, Any]]) -> str:
    """Return what the run waits for right now; empty if nothing goes on, or if it cannot be told."""
    if state == "waiting" and job is not None:
        return waiting.in_queue(job, time.time())
    if state == "starting":
        return "the supervisor to start the ranks"
    if state != "running":
        return ""
    try:
        return waiting.running(run, records)
    except OSError:  # the folder of a rollout that is over goes at any moment
        return ""


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
    return last["reason"], last.get("detail") or ""
