"""Shorten the wait that Slurm puts on a requeued job.

A job that is about to be requeued runs ``python -m gspo_hpc.launch.slurm.unhold JOB_ID [NODE to exclude ...]``. The
process outlives that job unless Slurm tracks processes with cgroups; then the job waits its two minutes, unless the
site has set ``AuthInfo=cred_expire``, or ``gspo-hpc status --watch`` runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm.commands import SlurmError

_PATIENCE = 120.0  # seconds until the job must be waiting
_POLL = 0.5


def unhold(job_id: str, excluded: list[str]) -> bool:
    """Wait until the job is in the queue, exclude the given nodes, and let it start. Return True if that was done."""
    deadline, before = time.monotonic() + _PATIENCE, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    while time.monotonic() < deadline:
        job = commands.job(job_id)
        if job is None or not (job.active or job.state == "NODE_FAIL"):
            return False
        # A requeued job may be COMPLETING first.
        if job.restarts > before and job.state in ("CONFIGURING", "RUNNING"):
            return False  # it has begun again without this process
        if job.state == "PENDING":
            if excluded:
                commands.exclude(job_id, excluded)
            commands.start_soon(job_id)
            return True
        time.sleep(_POLL)
    return False


if __name__ == "__main__":
    if os.fork() == 0:  # the child of a child is none of the job's: Slurm does not end it with the job
        os.setsid()
        with contextlib.suppress(SlurmError):
            unhold(sys.argv[1], sys.argv[2:])
    os._exit(0)
