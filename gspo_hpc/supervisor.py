"""Runs a Slurm job from within: starts the ranks with srun, watches them, restarts or requeues.

Floor 6, no torch: ``python -m gspo_hpc.supervisor RUN_DIR JOB_DIR`` is the batch step of every job that `submit` makes,
on the first node of the allocation. It holds the lock of the run. Each start of the ranks is an attempt; how it ended
decides what follows: nothing, the same again in this allocation, or a requeue.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc import config_file, leftovers, slurm_commands, srun
from gspo_hpc.config import Config
from gspo_hpc.control import Server
from gspo_hpc.durable import DISK_FULL, open_private, write_atomically, write_json
from gspo_hpc.plan import make_plan
from gspo_hpc.preemption import StopFlag, signals_default_in_children
from gspo_hpc.rundir import Attempt, Lock, RunDir, refuse_changes
from gspo_hpc.slurm_commands import SlurmError
from gspo_hpc.verdict import Verdict, failures_without_progress, judge, progress, task_failed

DONE, FAILED, REFUSED, REQUEUE = 0, 1, 2, 75

_POLL = 0.2  # seconds between two looks at the ranks
_SETTLE = 1.0  # seconds after the end of srun in which the last words of ranks may still come
_LINGER = 10.0  # seconds that a step may take to end once a rank has failed
_STACKS = 5.0  # seconds that hanging ranks get to write where they are
_LAST_MOMENT = 8.0  # seconds before the deadline at which the job is requeued, saved or not
_BALLAST = 2**18  # bytes that are kept on the disk, to be given up for what must be said when it is full
_LOCK_PATIENCE = 150.0  # a network file system frees the lock of a lost node only after its lease


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the batch step."""
    run_dir, job_dir = sys.argv[1:] if argv is None else argv
    flag = StopFlag().start()
    try:
        return supervise(Path(run_dir), Path(job_dir), os.environ["SLURM_JOB_ID"], flag)
    except (ValueError, OSError, SlurmError) as error:
        _say(f"error: {error}")
        return REFUSED if isinstance(error, ValueError) else FAILED


def supervise(run_dir: Path, job_dir: Path, job_id: str, flag: StopFlag) -> int:
    """Attempts until the run is done, the allocation is of no more use, or nothing would help.

    Raises ValueError where the run must not go on: another process has it, its config or its data were changed.
    """
    config = config_file.load(job_dir / "config.yaml")
    run = RunDir(run_dir)
    with _patient_lock(run, job_id) as lock:
        last = _attempts(config, run, lock, job_dir, job_id, flag)
    # Only now: the next start of this job may come before this process has ended.
    if last.requeue:
        return _requeue(config, job_id, last.excluded, flag)
    if last.cancel:
        _cancel(job_id, flag)
    return last.exit_code


@dataclass(frozen=True)
class _Last:
    """What follows the last attempt of this allocation."""

    exit_code: int
    requeue: bool = False
    cancel: bool = False
    excluded: Sequence[str] = ()


def _attempts(config: Config, run: RunDir, lock: Lock, job_dir: Path, job_id: str, flag: StopFlag) -> _Last:
    refuse_changes(run, config)
    ballast = job_dir / "ballast"
    write_atomically(ballast, bytes(_BALLAST))
    while True:
        attempt = run.new_attempt(config)
        lock.describe(attempt.number)
        write_json(run.plan, make_plan(config).to_json())
        verdict = _Attempt(config, run, attempt, job_dir, job_id, flag).run()
        leftovers.sweep(run.read_info()["run_id"], range(1, attempt.number + 1))
        full = DISK_FULL in verdict.detail
        if full:
            ballast.unlink(missing_ok=True)  # room for the last words
        attempt.finish(verdict.reason, verdict.exit_code, verdict.detail, reached=progress(run))
        _say(verdict.line(attempt.number))
        if full or verdict.reason in ("done", "refused"):
            return _Last(verdict.exit_code)
        if verdict.reason == "cancelled":
            return _Last(DONE, cancel=True)
        if verdict.healthy or flag.name:
            return _Last(REQUEUE, requeue=True)
        failures = failures_without_progress(run)
        if failures > config.faults.max_restarts:
            _say(
                f"gives up: {failures} failures without progress since step {progress(run)[0]} "
                f"(faults.max_restarts {config.faults.max_restarts}); the last: {verdict.detail}"
            )
            return _Last(FAILED)
        dead: list[str] = []
        with contextlib.suppress(SlurmError):
            dead = slurm_commands.dead_nodes(slurm_commands.hostnames(os.environ["SLURM_JOB_NODELIST"]))
        if dead:
            _say(f"no answer from {', '.join(dead)}: the job goes back to the queue, without them")
            return _Last(REQUEUE, requeue=True, excluded=dead)
        _say(f"starts again in this allocation (failure {failures} of {config.faults.max_restarts} at this point)")


class _Attempt:
    """One start of all ranks."""

    def __init__(
        self, config: Config, run: RunDir, attempt: Attempt, job_dir: Path, job_id: str, flag: StopFlag
    ) -> None:
        self.config, self.run_dir, self.attempt, self.job_dir = config, run, attempt, job_dir
        self.job_id, self.flag = job_id, flag
        self.server = Server(_address(config.cluster.nodes), config.world_size)
        self.stop: str | None = None  # why the ranks were asked to stop: "preempted", "time limit", ...
        self.requeued = self.releasing = False
        self.log = attempt.path / "srun.log"
        self.end_time: float | None = None
        self._read_end_time()

    def run(self) -> Verdict:
        """Start, watch to the end, and judge."""
        error = os.fdopen(open_private(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb")
        own = srun.environment(self.config, self.job_dir) | self.server.environment()
        own |= {"GSPO_HPC_ATTEMPT": str(self.attempt.number), "GSPO_HPC_RUN_ID": self.run_dir.read_info()["run_id"]}
        command = srun.command(self.config, self.run_dir.path, self.job_dir, list(own))
        try:
            with error, signals_default_in_children():
                # In a session of its own: a signal to this process's group is not one to srun.
                step = subprocess.Popen(
                    command, env=os.environ | own, stdin=subprocess.DEVNULL, stderr=error, start_new_session=True
                )
            problem = self._watch(step)
            return judge(self.server.ranks, self.config, problem, self.stop, step.returncode, self.log)
        finally:
            self.server.close()

    def _watch(self, step: subprocess.Popen[bytes]) -> str | None:
        """Until srun has ended. What was wrong, if this process had to end it."""
        began = last = time.monotonic()
        problem = None
        while step.poll() is None:
            self.server.poll(_POLL)
            now = time.monotonic()
            if now - last > 5.0:  # this process was suspended, and so were the ranks
                for state in self.server.ranks.values():
                    state.heard_at = state.moved_at = now
                began += now - last
            last = now
            self._stop_if_due()
            problem = self._problem(now, began)
            if problem is not None:
                _say(f"{problem}: ends this start")
                self._end(step)
        for _ in range(int(_SETTLE / _POLL)):
            self.server.poll(_POLL)
        return problem

    def _stop_if_due(self) -> None:
        """Pass on the first reason to stop to all ranks; requeue at the last moment, whether they have saved or not."""
        if self.flag.requested is not None and not self.releasing:
            self.releasing = True  # Slurm ends this process soon, and requeues the job itself
            release_later(self.job_id, [])
        if self.stop is None:
            self._look_for_a_stop()
        elif self.stop != "cancelled" and not self.requeued and self._left() < _LAST_MOMENT:
            self.requeued = True  # Slurm requeues what it preempts, but not what has run out of time
            _requeue_now(self.job_id, patience=_LAST_MOMENT)

    def _look_for_a_stop(self) -> None:
        states = self.server.ranks.values()
        signalled = next((state for state in states if state.signal is not None), None)
        if signalled is not None:
            self.server.poll(_POLL)  # what came at the same time
            gone = any(state.lost or state.outcome in ("failed", "refused") for state in states)
            if gone or task_failed(self.log):
                return  # it is srun that signals the others, since a rank has gone
        save = max((state.save_seconds for state in states), default=0.0)
        lead = max(float(self.config.slurm.signal_seconds), 2 * save + _LAST_MOMENT)
        asked = (self.job_dir / srun.CANCEL).exists()
        if signalled is None and not asked and self.flag.requested is None:
            if self._left() > lead:
                return
            self._read_end_time()  # somebody may have moved it
            if self._left() > lead:
                return
        self.stop, self.end_time = self._why(asked, self._left() <= lead)
        source = f"rank {signalled.rank} got {signalled.signal}" if signalled else self.flag.name or ""
        _say(f"{self.stop}{f' ({source})' if source else ''}: the ranks stop at the next safe point and save")
        self.server.stop(self.stop, self.end_time)

    def _left(self) -> float:
        """Seconds until Slurm ends the job, as far as that is known."""
        return math.inf if self.end_time is None else self.end_time - time.time()

    def _read_end_time(self) -> None:
        with contextlib.suppress(SlurmError):  # a limit that is not known is not waited for
            job = slurm_commands.job(self.job_id)
            self.end_time = job.end_time if job is not None else None

    def _why(self, asked: bool, out_of_time: bool) -> tuple[str, float | None]:
        """What the stop is for, and when Slurm will end the job."""
        if asked:
            return "cancelled", None
        with contextlib.suppress(SlurmError):
            job = slurm_commands.job(self.job_id, patience=5.0)
            if job is not None and job.state.startswith("CANCELLED"):
                return "cancelled", None
            if job is not None:
                preempted = job.preempt_time is not None and job.preempt_time >= (job.start_time or 0.0)
                if preempted:
                    return "preempted", job.end_time
                out_of_time |= job.end_time is not None and (
                    time.time() > job.end_time - self.config.slurm.signal_seconds - 60.0
                )
                return ("time limit" if out_of_time else "stopped"), job.end_time
        return ("time limit" if out_of_time else "stopped"), self.end_time

    def _problem(self, now: float, began: float) -> str | None:
        """Why this start must be ended from here, if it must."""
        faults, states = self.config.faults, self.server.ranks
        if now - began > faults.bringup_timeout and len(states) < self.config.world_size:
            missing = sorted(set(range(self.config.world_size)) - set(states))
            where = ", ".join(f"rank {rank} on {self._node(rank)}" for rank in missing[:4])
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            return f"not up within {faults.bringup_timeout:.0f} s: {where}{more} (faults.bringup_timeout)"
        for state in states.values():
            name = f"rank {state.rank} on {state.node}"
            if state.outcome is None and not state.lost:
                if now - state.heard_at > faults.heartbeat_timeout:
                    return (
                        f"{name} has not been heard of for {faults.heartbeat_timeout:.0f} s (faults.heartbeat_timeout)"
                    )
                if now - state.moved_at > faults.hang_timeout:
                    return f"{name} hangs in '{state.phase}' for {faults.hang_timeout:.0f} s (faults.hang_timeout)"
            elif (state.lost or state.outcome in ("failed", "refused")) and now - state.ended_at > _LINGER:
                return f"{name} has gone and its step has not"
        return None

    def _node(self, rank: int) -> str:
        nodes = slurm_commands.hostnames(os.environ["SLURM_JOB_NODELIST"])
        return nodes[rank // self.config.cluster.gpus_per_node]

    def _end(self, step: subprocess.Popen[bytes]) -> None:
        """Let every rank write where it is, and end the step."""
        names = {state.step for state in self.server.ranks.values() if state.step}
        with contextlib.suppress(SlurmError):
            for name in names:
                slurm_commands.signal_step(name, "CONT")  # one that was stopped could write nothing
                slurm_commands.signal_step(name, "ABRT")
            self._wait(step, _STACKS)
            for name in names:
                slurm_commands.cancel(name)
        for number in (signal.SIGTERM, signal.SIGKILL):  # srun ends its tasks at the first
            if self._wait(step, _LINGER):
                return
            with contextlib.suppress(ProcessLookupError):
                step.send_signal(number)
        step.wait()

    def _wait(self, step: subprocess.Popen[bytes], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while step.poll() is None and time.monotonic() < deadline:
            self.server.poll(_POLL)
        return step.poll() is not None


@contextlib.contextmanager
def _patient_lock(run: RunDir, job_id: str) -> Iterator[Lock]:
    """The lock of the run. One that this very job holds is that of its last start, on a node that was lost; one without
    an attempt is that of `submit`, which may still be at it when the job it has handed in begins."""
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            lock = run.lock()
            break
        except ValueError:
            holder = run.holder() or {}
            passing = holder.get("slurm_job_id") == job_id or holder.get("attempt") is None
            if not passing or time.monotonic() > deadline:
                raise
            time.sleep(1.0)
    with lock:
        yield lock


def _address(nodes: int) -> str:
    """Where ranks find this process: not reachable from outside where all of them are on this node."""
    name = os.environ.get("SLURMD_NODENAME")
    if nodes == 1 or name is None:
        return "127.0.0.1"
    return str(socket.getaddrinfo(slurm_commands.node_address(name), None, socket.AF_INET)[0][4][0])


def _requeue(config: Config, job_id: str, excluded: Sequence[str], flag: StopFlag) -> int:
    """Back into the queue; the exit code, which Slurm no longer asks for."""
    if not config.slurm.requeue:
        _say("slurm.requeue is false: submit it again to go on")
        return REQUEUE
    release_later(job_id, excluded)
    _requeue_now(job_id, patience=600.0)
    _wait_for_end(flag)
    return REQUEUE


def _wait_for_end(flag: StopFlag) -> None:
    """Slurm ends this process; an end before that would be the end of the job."""
    deadline = time.monotonic() + 60.0
    while flag.requested is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _requeue_now(job_id: str, patience: float) -> None:
    """Unless Slurm has done so already, or somebody has cancelled the job: a job that is over can be requeued, too."""
    try:
        job = slurm_commands.job(job_id, patience)
        if job is None or job.state != "RUNNING" or job.restarts != int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            return
        slurm_commands.requeue(job_id, patience)
    except SlurmError as error:
        _say(f"could not requeue: {error}")


def _cancel(job_id: str, flag: StopFlag) -> None:
    with contextlib.suppress(SlurmError):  # it is cancelled already
        slurm_commands.cancel(job_id)
    _wait_for_end(flag)


def release_later(job_id: str, excluded: Sequence[str]) -> None:
    """Start what lives on past this job's end, where Slurm lets it, and lifts the wait put on a requeued job."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "gspo_hpc.release", job_id, *excluded]
    with signals_default_in_children():
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, check=False)


def _say(text: str) -> None:
    print(f"gspo-hpc: {text}", flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
