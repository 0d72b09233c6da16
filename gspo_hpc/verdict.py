"""How an attempt ended, whose fault that was, and whether the run gets on at all.

Floor 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config import Config
from gspo_hpc.control import RankState
from gspo_hpc.rundir import RunDir

# How a rank ends when another one is gone: it is not the one to blame.
AFTERMATH = re.compile(r"gloo|nccl|connection|timed out|timeout|store|broken pipe|distributed", re.IGNORECASE)
_TASK = re.compile(r"error: (\S+): tasks? ([\d,-]+): (.*)")
HEALTHY = ("preempted", "time limit", "stopped")  # no fault of the run
_CODES = {"done": 0, "refused": 2, "failed": 1, "cancelled": 0}
_TOLD = {
    "done": "is done",
    "preempted": "was preempted",
    "time limit": "has run out of time",
    "stopped": "was stopped",
    "cancelled": "was cancelled",
    "refused": "was refused",
    "failed": "failed",
}


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended: "done", "preempted", "time limit", "stopped", "cancelled", "refused" or "failed"."""

    reason: str
    detail: str = ""
    saved: bool = True  # whether all ranks ended by themselves

    @property
    def healthy(self) -> bool:
        """Whether the run can simply go on in another job."""
        return self.reason in HEALTHY

    @property
    def exit_code(self) -> int:
        """As of the command line."""
        return _CODES.get(self.reason, 75)

    def line(self, attempt: int) -> str:
        """For the person who reads the log."""
        unsaved = "" if self.saved else ", before all ranks had stopped by themselves"
        return f"attempt {attempt} {_TOLD[self.reason]}{unsaved}" + (f": {self.detail}" if self.detail else "")


def judge(
    ranks: Mapping[int, RankState], config: Config, problem: str | None, stop: str | None, code: int, log: Path
) -> Verdict:
    """From what the ranks said and how they went. `problem`: why the watcher ended the step, `stop`: why it asked the
    ranks to stop, `code`: srun's exit code, `log`: what srun said."""
    outcomes = [state.outcome for state in ranks.values()]
    complete = len(outcomes) == config.world_size
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
    """The rank that ended first, unless its error is only about another one having gone."""
    gone = [state for state in ranks.values() if state.lost or state.outcome == "failed"]
    said = _said(log)
    ended = [found.groups() for line in said if (found := _TASK.search(line)) is not None]
    ended.sort(key=lambda item: item[2] == "Terminated")  # by srun, since another one had ended
    if ended and int(re.split("[,-]", ended[0][1])[0]) not in ranks and not any(s.outcome == "failed" for s in gone):
        return "rank {1} on {0} was killed or ended before it was up ({2})".format(*ended[0])  # and said no word
    if not gone:
        return said[-1] if said else f"srun ended with exit code {code}"

    def order(state: RankState) -> tuple[bool, float]:
        return state.outcome == "failed" and AFTERMATH.search(state.detail) is not None, state.ended_at

    first = min(gone, key=order)
    name = f"rank {first.rank} on {first.node}"
    if first.outcome == "failed":
        return f"{name}: {first.detail}"
    own = next((line for line in said if re.search(rf"\btasks?\b.*\b{first.rank}\b", line)), "")
    how = own.rsplit(": ", 1)[-1] if own else "its connection ended"
    if re.search("Segmentation fault|Bus error|Illegal instruction|Floating point|Aborted", how):
        return f"{name} crashed ({how})"
    return f"{name} was killed ({how}), by hand, for want of memory, or with its node"


def task_failed(log: Path) -> bool:
    """Whether srun says that a task has ended badly, after which it ends the others."""
    return any(_TASK.search(line) for line in _said(log))


def _said(log: Path) -> list[str]:
    """What srun and slurmstepd complained about."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return [line for line in lines if re.match(r"(srun|slurmstepd\S*): error: ", line)]


def progress(run: RunDir) -> tuple[int, int]:
    """How far a run has come: its last logged step, and finished groups of the rollout it is in."""
    step = max((int(record["step"]) for record in run.read_metrics()), default=-1)
    rollouts = sorted(run.rollouts.iterdir()) if run.rollouts.is_dir() else []
    newest = rollouts[-1].glob("rank-*.journal") if rollouts else ()
    return step, sum(max(0, path.read_bytes().count(b"\n") - 1) for path in newest)


def failures_without_progress(run: RunDir) -> int:
    """Failed attempts since the one that first came as far as the run has come by now."""
    records = [record for record in run.read_attempts() if record.get("reached") is not None]
    reached = [tuple(record["reached"]) for record in records]
    if not reached:
        return 0
    since = reached.index(max(reached))
    return sum(record["reason"] == "failed" for record in records[since:])
