"""The thing that a run waits for right now: Slurm, its ranks, the groups of a rollout, or the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_hpc.launch.slurm.commands import Job
from gspo_hpc.launch.verdict import finished_groups, newest_rollout
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import read_json
from gspo_hpc.system.text import duration

_SLURM = {  # what stands behind Slurm's reasons for a job that waits, as far as people meet them often
    "Priority": "jobs of a higher priority to start first",
    "Resources": "nodes that are free",
    "BeginTime": "its begin time, which Slurm sets two minutes ahead for a requeued job; status --watch shortens it",
    "Dependency": "the jobs that it depends on",
    "JobHeldUser": "its release: scontrol release {id}",
    "JobHeldAdmin": "an administrator, who holds it",
    "ReqNodeNotAvail": "nodes that are down, drained or reserved",
    "Reservation": "its reservation to begin",
    "PartitionTimeLimit": "a time limit that its partition allows: give a smaller slurm.time_minutes",
    "PartitionNodeLimit": "fewer nodes, for its partition has not so many: give a smaller cluster.nodes",
    "PartitionDown": "its partition, which is down",
}
_LIMITS = ("QOS", "Assoc")  # begin the reasons that are limits of a user, an account or a QOS


def in_queue(job: Job, now: float) -> str:
    """Return what a job that has not started waits for, and when Slurm expects it to start."""
    plain = job.reason.split(",")[0]
    if not plain or plain == "None":
        text = "Slurm to look at it"
    elif plain in _SLURM:
        text = _SLURM[plain].format(id=job.id)
    elif job.never_starts:
        text = f"what does not come by itself ({plain}): cancel it, correct the section slurm, and submit again"
    elif plain.startswith(_LIMITS):
        text = f"a limit of your account or QOS to allow it ({plain})"
    else:
        text = f"Slurm ({job.reason})"
    if job.start_time is not None and job.start_time > now:
        text += f"; Slurm expects it to start in {duration(job.start_time - now)}"
    return text


def running(run: RunDir, records: Sequence[Mapping[str, Any]]) -> str:
    """Return what a run that is running waits for: its ranks, a rollout or a step. `records`: those of its steps.

    Engines may sample a rollout ahead, which the next step does not wait for; it is named as well.
    """
    step = max((int(record["step"]) for record in records), default=0) + 1
    newest = newest_rollout(run)
    if newest is None:
        return "ranks and engines to be ready, and the first groups of rollout 0"
    wanted, updates = _quantities(run)
    if not wanted or not updates:
        return f"step {step:,}"
    own = (step - 1) // updates
    groups = finished_groups(run, own)
    if groups is None:
        return f"the first groups of rollout {own}"
    if groups < wanted:
        return f"rollout {own}, of which {groups:,} of {wanted:,} groups are finished"
    number, groups = newest
    ahead = f"; {groups:,} of {wanted:,} groups of rollout {number} are finished" if number > own else ""
    return f"step {step:,}{ahead}"


def _quantities(run: RunDir) -> tuple[int, int]:
    """Return the groups of a rollout and its updates, from the plan that the run keeps; 0 where they are not known."""
    try:
        found = read_json(run.plan)["quantities"]
        return int(found["num_rollout_prompts"]), int(found["steps_per_generation"]) * int(found["num_iterations"])
    except (ValueError, OSError, KeyError, TypeError):
        return 0, 0
