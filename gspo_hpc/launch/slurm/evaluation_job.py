"""An evaluation in a Slurm job: what was asked for, and the batch step itself.

``python -m gspo_hpc.launch.slurm.evaluation_job JOB_DIR`` evaluates as ``gspo-hpc eval`` does, into the job's log and
the same files; where there is a container, it starts that in it, and stays outside, where Slurm's commands are. Slurm
starts it again after a preemption or the loss of its node; before the time limit it puts itself back into the queue.
What was sampled by then is kept (evaluation/kept.py). :mod:`gspo_hpc.launch.slurm.evaluation` hands it in.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.launch.slurm import commands, ending, srun
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_folder, job_ids, job_logs
from gspo_hpc.system import environment
from gspo_hpc.system.exit_codes import FAILED
from gspo_hpc.system.files import read_json, write_json
from gspo_hpc.system.signals import StopFlag, signals_default_in_children

ORDER, _BEFORE = "eval.json", "kept.json"  # in a job folder: what is asked for; what was kept at the last requeue
_POLL = 1.0
_GRACE = 20.0  # seconds in which an evaluation that is stopped must end


@dataclass(frozen=True)
class Order:
    """An evaluation that is asked for."""

    target: str  # a run directory, a config, or the folder of a model
    is_run: bool
    step: int | None
    out: str | None  # file of the completions; None: one of the run
    overrides: tuple[str, ...]

    def command(self, config: Config, code: Path) -> list[str]:
        """Return the command that evaluates, in a container where the config has one."""
        step = [] if self.step is None else ["--step", str(self.step)]
        out = [] if self.out is None else ["--out", self.out]
        words, box = ["eval", self.target, *step, *out, *self.overrides], config.slurm.container
        if box is None:
            return environment.python("gspo_hpc", *words)
        names = srun.environment(config, code)
        if self.out is not None:
            folder = Path(self.out).parent
            box = replace(box, mounts=[*box.mounts, f"{folder}:{folder}"])
        inside = srun.in_container(box, config.cluster.platform == "cuda", Path(self.target), code, [*names])
        start = ["srun", "--nodes=1", "--ntasks=1", "--export=ALL", *config.slurm.srun, *inside]
        return [*start, *environment.python("gspo_hpc", *words, interpreter=box.python)]

    def kept_bytes(self) -> int:
        """Return how much of the evaluation is kept; it is what tells whether an allocation was of any use."""
        if self.out is not None:
            folders = [Path(f"{self.out}.unfinished")]
        else:
            folders = [*(Path(self.target) / "evaluations" / "unfinished").glob(f"{self.step:06d}-*")]
        total = 0
        for path in (found for folder in folders for found in folder.rglob("*.journal")):
            with contextlib.suppress(FileNotFoundError):  # of another evaluation of this step, which has ended
                total += path.stat().st_size
        return total


@dataclass(frozen=True)
class Evaluating:
    """A job that evaluates a checkpoint of a run, or waits to do so."""

    job_id: str
    state: str
    node: str
    step: int | None
    out: str | None  # file of the completions; None: one of the run
    log: str

    def to_json(self) -> dict[str, str | int | None]:
        """Return the fields as plain values."""
        return asdict(self)


def evaluating(run: Path) -> Iterator[Evaluating]:
    """Yield the jobs that evaluate a run's checkpoints, or wait to do so. Raises SlurmError if Slurm is silent."""
    jobs = RunDir(run / "evaluations")
    for job_id in job_ids(jobs):
        job = commands.job(job_id, patience=2.0)
        if job is None or not job.active:
            continue
        folder = job_folder(jobs, job_id)
        order, log = read_json(folder / ORDER), next(iter(job_logs(jobs, job_id)), folder)
        yield Evaluating(job_id, job.state.lower(), job.nodes, order["step"], order["out"], str(log))


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate in a process that is a job; see :func:`run`."""
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    return run(folder, StopFlag().start())


def run(folder: Path, flag: StopFlag) -> int:
    """Evaluate; go back into the queue where the time is up. Return the exit code of the evaluation."""
    values = read_json(folder / ORDER)
    order, config = Order(**{**values, "overrides": tuple(values["overrides"])}), loader.load(folder / "config.yaml")
    job_id = os.environ["SLURM_JOB_ID"]
    end = ending.end_time(config, job_id)
    with signals_default_in_children():
        variables = os.environ | srun.environment(config, folder / srun.CODE)
        child = subprocess.Popen(order.command(config, folder / srun.CODE), env=variables)
    try:
        while child.poll() is None and flag.requested is None:
            if end is not None and time.time() > end - config.slurm.signal_seconds:
                return _go_on_later(config, order, folder, job_id, child, flag)
            time.sleep(_POLL)
    finally:
        _end(child)
    if flag.requested is not None:
        ending.say(f"stopped by {flag.requested}: the next start of this job goes on")
        return ending.requeue(config, job_id, [], flag)
    return int(child.returncode)


def _go_on_later(
    config: Config, order: Order, folder: Path, job_id: str, child: subprocess.Popen[bytes], flag: StopFlag
) -> int:
    _end(child)
    kept, path = order.kept_bytes(), folder / _BEFORE
    before = int(read_json(path)["bytes"]) if path.exists() else -1
    if kept <= max(0, before):
        ending.say(
            f"slurm.time_minutes ({config.slurm.time_minutes}) were not enough to answer one more prompt: submit it "
            "with a longer time"
        )
        return FAILED
    write_json(path, {"bytes": kept})
    ending.say(f"the time is nearly up; {kept:,} bytes of completions are kept, and the next start goes on")
    return ending.requeue(config, job_id, [], flag)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the evaluation, if it lives; it has nothing to save."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
