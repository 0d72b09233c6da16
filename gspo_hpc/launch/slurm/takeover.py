"""Go on where a supervisor was killed, by hand or because memory ran out.

The batch script starts another one in the same allocation. Ranks that lose their supervisor stop at the next safe point
and save; until they are gone, nothing may begin.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import datetime
from pathlib import Path

from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.slurm.ending import say
from gspo_hpc.launch.verdict import Verdict, progress
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system import leftovers
from gspo_hpc.system.environment import ATTEMPT, JOB_BEGAN, KILLED, RUN_ID, node_name
from gspo_hpc.system.signals import StopFlag

_LEAVE = 120.0  # seconds in which ranks without a supervisor may stop and save
_LINGER = 5.0  # seconds in which a step must be over once its srun is gone: nobody else would end it
_END = 60.0  # seconds in which a step that was cancelled must be over
_CONTROLLER = 600.0  # seconds in which a controller that is restarted must answer
_POLL = 0.5


def take_over(run: RunDir, job_id: str, flag: StopFlag) -> Verdict | None:
    """Return how the attempt ended that a supervisor of this job was watching when it was killed, once it is over.

    None if no attempt has started in this allocation. The caller holds the lock of the run. Raises SlurmError if the
    ranks do not end.
    """
    status = os.environ.pop(KILLED)
    records = run.read_attempts()
    last = records[-1] if records else None
    if last is None or last.get("slurm_job_id") != job_id:
        return None
    began = float(os.environ.get(JOB_BEGAN, "0"))
    if datetime.fromisoformat(str(last["started"])).timestamp() < began:  # a requeued job keeps its id
        return None
    number = int(last["attempt"])
    run_id = run.read_info()["run_id"]
    _end_ranks(job_id, {f"{RUN_ID}={run_id}".encode(), f"{ATTEMPT}={number}".encode()}, flag)
    leftovers.sweep(run_id, range(1, number + 1))
    if last["ended"] is not None:  # killed between two attempts
        return Verdict(str(last["reason"]), str(last.get("detail") or ""))
    node = node_name()
    detail = f"signal {int(status) - 128} ended the supervisor on {node}: somebody sent it, or memory ran out"
    verdict = Verdict("failed", detail, saved=False)
    run.attempt(number).finish(verdict.reason, verdict.exit_code, verdict.detail, reached=progress(run))
    say(verdict.line(number))
    return verdict


def _end_ranks(job_id: str, mark: set[bytes], flag: StopFlag) -> None:
    """Wait until no step of the job runs; end those that do not stop by themselves. `mark`: of srun's environment."""
    stop_at = time.monotonic() + _LEAVE
    while steps := commands.steps(job_id, _CONTROLLER):
        if not _has_srun(mark):
            stop_at = min(stop_at, time.monotonic() + _LINGER)
        if flag.requested is not None or time.monotonic() > stop_at:
            break
        time.sleep(_POLL)
    for step in steps:
        say(f"step {step} has not ended without its supervisor: it is cancelled")
        with contextlib.suppress(SlurmError):  # it has ended meanwhile
            commands.cancel(step)
    deadline = time.monotonic() + _END
    while left := commands.steps(job_id, _CONTROLLER):
        if time.monotonic() > deadline:
            raise SlurmError(f"{', '.join(left)}: the ranks do not end")
        time.sleep(_POLL)


def _has_srun(mark: set[bytes]) -> bool:
    """Return True if a process of srun with these variables lives on this node."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, another user's, or gone
            if path.name.isdecimal() and (path / "comm").read_bytes() == b"srun\n":
                if mark <= set((path / "environ").read_bytes().split(b"\0")):
                    return True
    return False
