"""Slurm's commands beyond submitting: a job's state, requeue, begin time, excluded nodes, signals, dead nodes.

No command runs in a shell. While the controller restarts, a command is repeated until it answers.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from gspo_hpc.system import environment

_AWAY = re.compile(  # the controller does not answer, or its configuration is just being written: it may in a moment
    r"unable to contact slurm controller|connection refused|connect failure|timed out|zero bytes were transmitted|"
    r"unable to (?:process configuration file|establish configuration source)",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(
    r"connection refused|connect failure|unable to (?:process configuration file|establish configuration source)",
    re.IGNORECASE,
)
_UNCONFIGURED = re.compile(r"(?:unable to|could not) establish (?:a )?configuration source", re.IGNORECASE)
_START_SECONDS = 5  # the clocks of two nodes may differ by a few of them
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_PAIR = re.compile(r"(?:^| )([A-Z][A-Za-z/:]*)=(\S*)")
_FAILED_ON = re.compile(r"failed on node ([^:\s]+)|[Nn]ode failure on (\S+)|error: Node ([^,\s]+), is not responding")


class SlurmError(RuntimeError):
    """A failure of a Slurm command; the text is what the command printed."""


# Reasons that lie in the job itself. Limits per user, account or group, and licenses, pass as other jobs end.
_LASTING = re.compile(
    r"Partition(TimeLimit|NodeLimit|Config)|BadConstraints|PerJob|PerNode|MaxMemPerLimit|QOSMin"
    r"|Invalid(Account|QOS)|(Account|QOS)NotAllowed|DependencyNeverSatisfied|Reservation(Deleted|Invalid)"
)


@dataclass(frozen=True)
class Job:
    """The state of a job, as ``scontrol show job`` prints it. Times are seconds since the epoch."""

    id: str  # 123, or 123_4 for a task of an array
    state: str
    reason: str
    nodes: str
    start_time: float | None
    end_time: float | None  # when Slurm will end it, a preemption's grace included
    preempt_time: float | None  # when its preemption began, if it did
    restarts: int
    comment: str

    @property
    def active(self) -> bool:
        """True if the job runs or will run."""
        return self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")

    @property
    def never_starts(self) -> bool:
        """True if the job is pending for a reason that no other job's end takes away."""
        return self.state == "PENDING" and _LASTING.search(self.reason) is not None


def job(job_id: str, patience: float = 60.0) -> Job | None:
    """Return a job; None if Slurm no longer knows it.

    Raises SlurmError if the controller does not answer for `patience` seconds.
    """
    try:
        text = run(["scontrol", "show", "job", "--oneliner", job_id], patience=patience)
    except SlurmError as error:
        if _UNKNOWN_JOB.search(str(error)):
            return None
        raise
    found = [parse_job(line) for line in text.splitlines() if line.strip()]  # a line for each component of a job
    return replace(found[0], id=job_id, nodes=",".join(one.nodes for one in found if one.nodes))


def parse_pairs(line: str) -> dict[str, str]:
    """Return the values of a line of ``scontrol show --oneliner`` by their keys; the first where a key comes twice."""
    return dict(reversed(_PAIR.findall(line)))


def parse_job(text: str) -> Job:
    """Return the job of one line of ``scontrol show job --oneliner``."""
    pairs = parse_pairs(text)
    return Job(
        id=_id(pairs),
        state=pairs["JobState"].replace("SIGNALING", "RUNNING"),  # for a moment, while it is sent a signal
        reason=pairs.get("Reason", ""),
        nodes=pairs.get("NodeList", "").replace("(null)", ""),
        start_time=_time(pairs.get("StartTime")),
        end_time=_time(pairs.get("EndTime")),
        preempt_time=_time(pairs.get("PreemptTime")),
        restarts=int(pairs.get("Restarts", "0")),
        comment=pairs.get("Comment", ""),
    )


def _id(pairs: Mapping[str, str]) -> str:
    """Return the id of a job; tasks of an array that have not started are shown together, as 0-3%2."""
    task = pairs.get("ArrayTaskId", "")
    return f"{pairs['ArrayJobId']}_{task}" if task.isdecimal() else pairs["JobId"]


def own_jobs(patience: float = 60.0, told: Callable[[], None] | None = None) -> list[tuple[str, str]]:
    """Return (id, comment) of each job of this user that waits or runs; tasks of an array are 123_0, 123_1, ...

    Components of a heterogeneous job, 123+0 and 123+1, are one job. `told` is called once if Slurm does not answer at
    once.
    """
    lines = run(["squeue", "--noheader", "--me", "--array", "--format=%i %k"], patience, told).splitlines()
    found = (line.strip().partition(" ") for line in lines)
    return list(dict.fromkeys((job_id.partition("+")[0], comment) for job_id, _, comment in found))


def requeue(job_id: str, patience: float = 60.0) -> None:
    """Put a running job back into the queue, which ends it."""
    run(["scontrol", "requeue", job_id], patience)


def start_soon(job_id: str) -> None:
    """Shorten the wait that Slurm puts on a requeued job to a few seconds.

    Not to none: a node refuses to start a job in the same second, by its own clock, in which that job ended there ("Job
    credential revoked"), and the job would have failed for good.
    """
    run(["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{_START_SECONDS}"])


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off these nodes."""
    run(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def in_components(steps: Collection[str]) -> list[str]:
    """Return the names under which Slurm takes signals for steps (JOB.STEP) of this job: one for each component."""
    if "SLURM_HET_SIZE" not in os.environ:
        return sorted(steps)
    ids = environment.of_components("SLURM_JOB_ID")
    return [f"{job_id}.{number}" for number in sorted({step.rpartition(".")[2] for step in steps}) for job_id in ids]


def signal_step(step: str, name: str) -> None:
    """Send a signal, such as "ABRT", to all processes of a step (JOB.STEP)."""
    run(["scancel", f"--signal={name}", step])


def steps(job_id: str, patience: float = 60.0) -> list[str]:
    """Return the steps of this job (JOB.STEP) that srun started and that still run, in each of its components."""
    ids = environment.of_components("SLURM_JOB_ID") if "SLURM_HET_SIZE" in os.environ else [job_id]
    names = run(["squeue", "--noheader", "--steps", f"--jobs={','.join(ids)}", "--format=%i"], patience).split()
    return [name for name in names if name.rpartition(".")[2].isdecimal()]


def cancel(job_id: str) -> None:
    """End a job, or a step (JOB.STEP), for good."""
    run(["scancel", job_id])


def hostnames(node_list: str) -> list[str]:
    """Return the names that a list such as n[1-4] stands for."""
    return run(["scontrol", "show", "hostnames", node_list]).split()


def node_address(node: str) -> str:
    """Return the name or the address on which a node listens."""
    found = re.search(r"NodeAddr=(\S+)", run(["scontrol", "show", "node", node, "--oneliner"]))
    return found.group(1) if found else node


def allocation() -> list[list[str]]:
    """Return the nodes of this job, for each of its components."""
    return [hostnames(listed) for listed in environment.of_components("SLURM_JOB_NODELIST")]


def dead_nodes(allocated: Sequence[Sequence[str]], timeout: float = 30.0) -> list[str]:
    """Return the nodes of this job's :func:`allocation` that start no process any more. Call it inside of it."""
    nodes, probe = [node for part in allocated for node in part], ["srun"]
    for number, part in enumerate(allocated):
        probe += [*([":"] if number else []), *([f"--het-group={number}"] if len(allocated) > 1 else []), "--overlap"]
        probe += [f"--nodes={len(part)}", f"--ntasks={len(part)}", "--ntasks-per-node=1", "--gres=none", "--mem=0"]
        probe.append("true")
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=timeout, check=False)
        text = done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        text = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
    named = {name for match in _FAILED_ON.finditer(text) for name in match.groups() if name}
    states = run(["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"])
    for line in states.splitlines():
        name, state = line.split()
        if state.endswith("*") or state.startswith(("down", "fail")):
            named.add(name)
    return sorted(named & set(nodes))


def is_unreachable(error: str) -> bool:
    """Return True if this is the error of a command that did not get as far as the controller: it changed nothing."""
    return _UNREACHABLE.search(error) is not None


def is_away(error: str) -> bool:
    """Return True if this is the error of a command to which the controller did not answer: it may be restarting."""
    return _AWAY.search(error) is not None


def explained(error: str) -> str:
    """Return the error of a command in two lines if Slurm does not answer: what to do, and the last that it printed.

    The lines before that only lead up to it.
    """
    if _UNCONFIGURED.search(error):
        fix = "Slurm is not set up on this machine: give the command on a login node of the cluster, or set SLURM_CONF"
    elif is_away(error):
        fix = "Slurm's controller does not answer: give the command again when `scontrol ping` says that it is up"
    else:
        return error
    return f"{fix}\n{error.splitlines()[-1]}"


def run(command: Sequence[str], patience: float = 60.0, told: Callable[[], None] | None = None) -> str:
    """Run one of Slurm's commands and return its standard output. Raises SlurmError with its standard error.

    While the controller does not answer, the command is repeated for `patience` seconds: a restart takes a few. `told`
    is called once before it is repeated.
    """
    deadline = time.monotonic() + patience
    variables = os.environ | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    while True:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=variables, timeout=max(10.0, patience), check=False
            )
        except FileNotFoundError:
            raise SlurmError(f"{command[0]} is not installed here: is this a machine of a Slurm cluster?") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]} did not answer within {max(10.0, patience):.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        error = done.stderr.strip() or done.stdout.strip()
        if not is_away(error) or time.monotonic() > deadline:
            raise SlurmError(explained(error) or f"{command[0]} ended with exit code {done.returncode}")
        if told is not None:
            told()
            told = None
        time.sleep(1.0)


def _time(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:  # Unknown, N/A, None
        return None
