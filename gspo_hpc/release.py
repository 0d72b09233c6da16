"""Lifts the wait that Slurm puts on a requeued job: ``python -m gspo_hpc.release JOB_ID [NODE to exclude ...]``.

Floor 6. Started by a job that is about to be requeued and lives on past its end, where Slurm's process tracking lets it
(not where a job's processes are in a cgroup; there the job waits its two minutes, unless the site has set
``AuthInfo=cred_expire``, or ``gspo-hpc status --watch`` runs).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from gspo_hpc import slurm_commands
from gspo_hpc.slurm_commands import SlurmError

_PATIENCE = 120.0  # seconds until the job must be waiting
_POLL = 0.5


def release(job_id: str, excluded: list[str]) -> bool:
    """Wait until the job is waiting, keep it off the excluded nodes, and let it start; whether that was done."""
    deadline, before = time.monotonic() + _PATIENCE, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    while time.monotonic() < deadline:
        job = slurm_commands.job(job_id)
        if job is None or not (job.active or job.state == "NODE_FAIL"):
            return False
        if job.restarts > before and job.state in (
            "CONFIGURING",
            "RUNNING",
        ):  # what is requeued may be COMPLETING first
            return False  # it has begun again without this
        if job.state == "PENDING":
            if excluded:
                slurm_commands.exclude(job_id, excluded)
            slurm_commands.start_soon(job_id)
            return True
        time.sleep(_POLL)
    return False


if __name__ == "__main__":
    if os.fork() == 0:  # no child of the job any more, which Slurm would end with it
        os.setsid()
        with contextlib.suppress(SlurmError):
            release(sys.argv[1], sys.argv[2:])
    os._exit(0)
