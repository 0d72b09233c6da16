"""The end of an attempt, which is recorded, and of its job: back into the queue, or cancelled for good."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.verdict import Verdict, progress
from gspo_hpc.runs.directory import Attempt, RunDir
from gspo_hpc.system import environment
from gspo_hpc.system.exit_codes import REQUEUE
from gspo_hpc.system.files import DISK_FULL
from gspo_hpc.system.signals import StopFlag, signals_default_in_children


def requeue(config: Config, job_id: str, excluded: Sequence[str], flag: StopFlag) -> int:
    """Put the job back into the queue; return the exit code, which Slurm ignores then."""
    if not config.slurm.requeue:
        say("slurm.requeue is false: submit the run again to go on")
        return REQUEUE
    unhold_later(job_id, excluded)
    requeue_now(job_id, patience=600.0)
    wait_for_end(flag)
    return REQUEUE


def runs(job_id: str, patience: float = 60.0) -> bool:
    """Return True if the job runs, as it did when this process began: neither cancelled nor requeued since."""
    job = commands.job(job_id, patience)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return job is not None and job.state == "RUNNING" and job.restarts == restarts


def end_time(config: Config, job_id: str, patience: float = 60.0) -> float | None:
    """Return when Slurm ends the job, in seconds since the epoch; None if the job has no limit that is known.

    Without an answer of Slurm within `patience` seconds it is what the batch script noted at the start of the
    allocation, plus the limit that was asked for: however often the processes of the job have started since.
    """
    try:
        job = commands.job(job_id, patience)
        return job.end_time if job is not None else None
    except SlurmError:
        began, minutes = os.environ.get(environment.JOB_BEGAN), config.slurm.time_minutes
        return None if began is None or minutes is None else float(began) + 60.0 * minutes


def wait_for_end(flag: StopFlag) -> None:
    """Wait until Slurm ends this process: if it ended earlier by itself, the job would be over."""
    deadline = time.monotonic() + 60.0
    while flag.requested is None and time.monotonic() < deadline:
        time.sleep(0.1)


def requeue_now(job_id: str, patience: float) -> None:
    """Requeue the job, unless Slurm did so already or it was cancelled: Slurm would requeue a cancelled job, too."""
    try:
        if runs(job_id, patience):
            commands.requeue(job_id, patience)
    except SlurmError as error:
        say(f"could not requeue: {error}")


def cancel(job_id: str, flag: StopFlag) -> None:
    """End the job for good, and wait for that."""
    with contextlib.suppress(SlurmError):  # it may be cancelled already
        commands.cancel(job_id)
    wait_for_end(flag)


def unhold_later(job_id: str, excluded: Sequence[str]) -> None:
    """Start a process that outlives this job, if Slurm lets it, and shortens the wait of the requeued job."""
    quiet = subprocess.DEVNULL
    command = environment.python("gspo_hpc.launch.slurm.unhold", job_id, *excluded)
    with signals_default_in_children():
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, check=False)


def say(text: str) -> None:
    """Write a line into the job's log."""
    print(f"gspo-hpc: {text}", flush=True)


def record(verdict: Verdict, run: RunDir, attempt: Attempt, ballast: Path) -> Verdict:
    """Record how an attempt ended, if need be in the room that `ballast` keeps; return what was recorded."""
    if DISK_FULL not in verdict.detail:
        try:
            attempt.finish(verdict.reason, verdict.exit_code, verdict.detail, reached=progress(run))
            return verdict
        except OSError as error:
            if DISK_FULL not in str(error) or not ballast.exists():
                raise
            if verdict.reason == "failed":
                verdict = replace(verdict, detail=f"{verdict.detail}; {error}")
    ballast.unlink(missing_ok=True)
    attempt.finish(verdict.reason, verdict.exit_code, verdict.detail, reached=progress(run))
    return verdict
