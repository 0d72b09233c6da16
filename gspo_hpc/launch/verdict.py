"""Judge how an attempt ended, whose fault that was, and whether the run makes progress at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.launch.failures import Failure, first_failure
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.control import RankState
from gspo_hpc.system.exit_codes import DONE, FAILED, REFUSED, REQUEUE
from gspo_hpc.system.signals import MEMORY

_TASK = re.compile(r"error: (\S+): tasks? ([\d,-]+): (.*)")
HEALTHY = ("preempted", "time limit", "stopped", MEMORY)  # not failures: the run simply goes on later
_CODES = {"done": DONE, "refused": REFUSED, "failed": FAILED, "cancelled": DONE}  # any other reason: REQUEUE
_SENTENCE = {
    "done": "is done",
    "preempted": "was preempted",
    "time limit": "ran out of time",
    "stopped": "was stopped",
    "cancelled": "was cancelled",
    MEMORY: "was ended before memory runs out",
    "refused": "was refused",
    "failed": "failed",
}


@dataclass(frozen=True)
class Verdict:
    """The way an attempt ended: done, failed, refused, cancelled, or one of HEALTHY."""

    reason: str
    detail: str = ""
    saved: bool = True  # all ranks ended by themselves

    @property
    def healthy(self) -> bool:
        """True if the run can simply go on in another job."""
        return self.reason in HEALTHY

    @property
    def exit_code(self) -> int:
        """Exit code that the command line would return."""
        return _CODES.get(self.reason, REQUEUE)

    def line(self, attempt: int) -> str:
        """Return the sentence that goes into the log of the job."""
        unsaved = "" if self.saved else ", before all ranks had stopped by themselves"
        return f"attempt {attempt} {_SENTENCE[self.reason]}{unsaved}" + (f": {self.detail}" if self.detail else "")


def judge(
    ranks: Mapping[int, RankState], config: Config, problem: str | None, stop: str | None, code: int, log: Path
) -> Verdict:
    """Judge an attempt from what its ranks reported and how they ended.

    `problem`: why the supervisor ended the step, if it did; `stop`: why it asked the ranks to stop, if it did; `code`:
    srun's exit code; `log`: srun's messages.
    """
    outcomes = [state.outcome for state in ranks.values()]
    complete = len(outcomes) == config.num_ranks
    if complete and all(outcome == "done" for outcome in outcomes):
        return Verdict("done")
    if stop is not None and complete and all(outcome in ("done", "stopped") for outcome in outcomes):
        return Verdict(stop)
    refused = next((state for state in ranks.values() if state.outcome == "refused"), None)
    if refused is not None:
        return Verdict("refused", refused.detail)
    if problem is None and stop is not None and not any(outcome == "failed" for outcome in outcomes):
        return Verdict(stop, saved=False)  # killed by Slurm before it had saved
    return Verdict("failed", problem or _blame(ranks, code, log), saved=False)


def _blame(ranks: Mapping[int, RankState], code: int, log: Path) -> str:
    """Return a sentence about the rank that failed first."""
    gone = [state for state in ranks.values() if state.lost or state.outcome == "failed"]
    complaints = _complaints(log)
    ended = [found.groups() for line in complaints if (found := _TASK.search(line)) is not None]
    ended.sort(key=lambda item: item[2] == "Terminated")  # ended by srun because another task had failed
    if ended and int(re.split("[,-]", ended[0][1])[0]) not in ranks and not any(s.outcome == "failed" for s in gone):
        return "rank {1} on {0} was killed or ended before it was up ({2})".format(*ended[0])  # and reported nothing
    if not gone:
        return complaints[-1] if complaints else f"srun ended with exit code {code}"

    failures = (Failure(s.rank, s.detail, killed=s.outcome != "failed", at=s.ended_at) for s in gone)
    first = ranks[first_failure(failures).rank]
    name = f"rank {first.rank} on {first.node}"
    if first.outcome == "failed":
        return f"{name}: {first.detail}"
    own = next((line for line in complaints if re.search(rf"\btasks?\b.*\b{first.rank}\b", line)), "")
    how = own.rsplit(": ", 1)[-1] if own else "its connection ended"
    if re.search("Segmentation fault|Bus error|Illegal instruction|Floating point|Aborted", how):
        return f"{name} crashed ({how})"
    return f"{name} was killed ({how}), by hand, because memory ran out, or with its node"


def task_failed(log: Path) -> bool:
    """Return True if srun reports that a task failed, after which it ends the others."""
    return any(_TASK.search(line) for line in _complaints(log))


def _complaints(log: Path) -> list[str]:
    """Return the errors that srun and slurmstepd wrote."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return [line for line in lines if re.match(r"(srun|slurmstepd\S*): error: ", line)]


def progress(run: RunDir) -> tuple[int, int]:
    """Return how far a run has come: its last logged step, and the finished groups of the rollout it is in."""
    step = max((int(record["step"]) for record in run.read_metrics()), default=-1)
    newest = newest_rollout(run)
    return step, 0 if newest is None else newest[1]


def newest_rollout(run: RunDir) -> tuple[int, int] | None:
    """Return the number of the newest rollout and its finished groups, as its journals have them; None before it."""
    rollouts = sorted(path for path in run.rollouts.glob("*") if path.name.isdecimal())
    return (int(rollouts[-1].name), _groups_in(rollouts[-1])) if rollouts else None


def finished_groups(run: RunDir, rollout: int) -> int | None:
    """Return how many groups the journals of a rollout have; None if it has not begun."""
    found = [path for path in run.rollouts.glob("*") if path.name.isdecimal() and int(path.name) == rollout]
    return _groups_in(found[0]) if found else None


def _groups_in(folder: Path) -> int:
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in folder.glob("rank-*.journal"))


def failures_without_progress(run: RunDir) -> int:
    """Return the number of failed attempts since the one that first came as far as the run is now.

    Attempts from before the run was begun anew, with another config, do not count.
    """
    first = run.read_info().get("first_attempt", 1)
    attempts = (record for record in run.read_attempts() if record["attempt"] >= first)
    records = [record for record in attempts if record.get("reached") is not None]
    reached = [tuple(record["reached"]) for record in records]
    if not reached:
        return 0
    since = reached.index(max(reached))
    return sum(record["reason"] == "failed" for record in records[since:])
