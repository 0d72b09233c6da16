"""Supervise a Slurm job from inside: start the ranks with srun, watch them, restart them or requeue the job.

``python -m gspo_hpc.launch.slurm.supervisor RUN_DIR JOB_DIR`` is the batch step of every job that ``submit`` makes. It
runs on the first node of the allocation and holds the lock of the run. Each start of the ranks is an attempt. Depending
on how it ended, the job ends, starts the ranks again in this allocation, or is requeued.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gspo_hpc.config import loader
from gspo_hpc.config.derived import node_of
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import preflight, watch
from gspo_hpc.launch.notify.notices import Notices
from gspo_hpc.launch.slurm import commands, ending, srun
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.slurm.ending import say
from gspo_hpc.launch.slurm.takeover import take_over
from gspo_hpc.launch.verdict import Verdict, failures_without_progress, judge, progress, task_failed
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.runs.directory import Attempt, RunDir
from gspo_hpc.runs.lock import Lock
from gspo_hpc.runs.same_run import refuse_changes
from gspo_hpc.system import environment, leftovers
from gspo_hpc.system.control import Server
from gspo_hpc.system.exit_codes import DONE, FAILED, KILLED, REFUSED, REQUEUE
from gspo_hpc.system.files import DISK_FULL, open_log, write_atomically, write_json
from gspo_hpc.system.processes import immortal
from gspo_hpc.system.signals import MEMORY, StopFlag, signals_default_in_children

T = TypeVar("T")

_POLL = 0.2  # seconds between two looks at the ranks
_SETTLE = 1.0  # seconds after the end of srun in which last messages of ranks may still arrive
_STACKS = 5.0  # seconds that hanging ranks get to write their stacks
_ENDING = 5.0  # seconds that a step gets to end once Slurm is asked to end it
_LEAVING = 3.0  # seconds that its srun gets to end after each signal: SIGTERM, SIGKILL
_ANSWER = 2.0  # seconds that the watch waits for an answer of Slurm, which may be away, before it does without
_LAST_MOMENT = 8.0  # seconds before the deadline at which the job is requeued, saved or not
_BALLAST = 2**18  # bytes kept on the disk, and freed for the last records of a run that filled it
_LOCK_PATIENCE = 150.0  # seconds: a network file system frees the lock of a lost node only after its lease


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise the job, and return the exit code of its batch step."""
    run_dir, job_dir = sys.argv[1:] if argv is None else argv
    flag = StopFlag().start()
    try:
        return supervise(Path(run_dir), Path(job_dir), str(environment.slurm_job_id()), flag)
    except (ValueError, OSError, SlurmError, MemoryError) as error:
        say(f"error: {error or type(error).__name__}")
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return KILLED  # the kernel may as well have chosen this process: the batch script starts another
        return REFUSED if isinstance(error, ValueError) else FAILED


def supervise(run_dir: Path, job_dir: Path, job_id: str, flag: StopFlag) -> int:
    """Start attempts until the run is done, the allocation is of no more use, or another attempt would not help.

    Returns the exit code. Raises ValueError if the run must not go on: another process holds it, or its config or data
    were changed.
    """
    config = loader.load(job_dir / "config.yaml")
    run = RunDir(run_dir)
    with Notices(config, run, say) as notices:
        with _patient_lock(run, job_id) as lock:
            last = _attempts(config, run, lock, job_dir, job_id, flag, notices)
        notices.over(last.exit_code)
        # Only after the lock is free: the next start of this job may come before this process has ended.
        if last.requeue:
            return ending.requeue(config, job_id, last.excluded, flag)
        if last.cancel:
            ending.cancel(job_id, flag)
        return last.exit_code


@dataclass(frozen=True)
class _Last:
    """The decision after the last attempt of this allocation."""

    exit_code: int
    requeue: bool = False
    cancel: bool = False
    excluded: Sequence[str] = ()


def _attempts(
    config: Config, run: RunDir, lock: Lock, job_dir: Path, job_id: str, flag: StopFlag, notices: Notices
) -> _Last:
    refuse_changes(run, config)
    ballast = job_dir / "ballast"
    write_atomically(ballast, bytes(_BALLAST))
    verdict = None
    if environment.KILLED in os.environ:
        verdict = take_over(run, job_id, flag)
        if _is_ended(job_id):
            ending.wait_for_end(flag)
            return _Last(REQUEUE)
    while True:
        last = None if verdict is None else _decide(verdict, config, run, flag)
        if last is not None:
            return last
        attempt = run.new_attempt(config)
        lock.describe(attempt.number)
        write_json(run.plan, make_plan(config, preflight.rows(config)).to_json())
        verdict = _Attempt(config, run, attempt, job_dir, job_id, flag).run()
        leftovers.sweep(run.read_info()["run_id"], range(1, attempt.number + 1))
        verdict = ending.record(verdict, run, attempt, ballast)
        say(verdict.line(attempt.number))
        notices.ended(verdict.reason, verdict.detail)


def _is_ended(job_id: str) -> bool:
    """Return True if Slurm is ending the job already, and may have sent the signal that ended a supervisor."""
    with contextlib.suppress(SlurmError):
        return not ending.runs(job_id)
    return False


def _decide(verdict: Verdict, config: Config, run: RunDir, flag: StopFlag) -> _Last | None:
    """Return the decision after an attempt that ended so; None if another is to start in this allocation."""
    if DISK_FULL in verdict.detail or verdict.reason in ("done", "refused"):
        return _Last(verdict.exit_code)
    if verdict.reason == "cancelled":
        return _Last(DONE, cancel=True)
    if verdict.reason == MEMORY and not flag.name:
        say("starting again in this allocation, with memory that is free again")
        return None
    if verdict.healthy or flag.name:
        return _Last(REQUEUE, requeue=True)
    failures = failures_without_progress(run)
    if failures > config.faults.max_restarts:
        say(
            f"gives up: {failures} failures without progress since step {progress(run)[0]} "
            f"(faults.max_restarts {config.faults.max_restarts}); the last: {verdict.detail}"
        )
        return _Last(FAILED)
    dead: list[str] = []
    with contextlib.suppress(SlurmError):
        dead = commands.dead_nodes(commands.allocation())
    if dead:
        say(f"no answer from {', '.join(dead)}: the job goes back to the queue, without them")
        return _Last(REQUEUE, requeue=True, excluded=dead)
    say(f"starting again in this allocation (failure {failures} of {config.faults.max_restarts} at this point)")
    return None


class _Attempt:
    """One start of all ranks."""

    def __init__(
        self, config: Config, run: RunDir, attempt: Attempt, job_dir: Path, job_id: str, flag: StopFlag
    ) -> None:
        self.config, self.run_dir, self.attempt, self.job_dir = config, run, attempt, job_dir
        self.job_id, self.flag = job_id, flag
        self.server = Server(_address(config.cluster.nodes), config.num_ranks)
        self.stop: str | None = None  # why the ranks were asked to stop: "preempted", "time limit", ...
        self.detail = ""  # of a stop that ranks asked for themselves
        self.requeued = self.unholding = False
        self.nodes: list[str] | None = None  # once their names were asked for
        self.log = attempt.path / "srun.log"
        self.end_time = ending.end_time(config, job_id, patience=_ANSWER)

    def run(self) -> Verdict:
        """Start the ranks, watch them to the end, and judge how they ended."""
        error = os.fdopen(open_log(self.log), "wb")
        archive = Path(os.environ[environment.CODE])
        own = srun.environment(self.config, archive) | self.server.environment()
        own |= {environment.ATTEMPT: str(self.attempt.number), environment.RUN_ID: self.run_dir.read_info()["run_id"]}
        command = srun.command(self.config, self.run_dir.path, archive, list(own))
        try:
            with error, signals_default_in_children():
                # In its own session: a signal to the group of this process must not reach srun.
                step = subprocess.Popen(
                    command, env=os.environ | own, stdin=subprocess.DEVNULL, stderr=error, start_new_session=True
                )
            problem = self._watch(step)
            code = -signal.SIGKILL if step.returncode is None else step.returncode
            verdict = judge(self.server.ranks, self.config, problem, self.stop, code, self.log)
            return replace(verdict, detail=verdict.detail or self.detail)
        finally:
            self.server.close()

    def _watch(self, step: subprocess.Popen[bytes]) -> str | None:
        """Wait for the end of srun. Return what was wrong if this process had to end it."""
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
            problem = watch.problem(self.server.ranks, self.config, now, began, self._node)
            if problem is not None:
                say(f"{problem}: ending this attempt")
                self._end(step)
                break
        for _ in range(int(_SETTLE / _POLL)):
            self.server.poll(_POLL)
        return problem

    def _stop_if_due(self) -> None:
        """Pass the first reason to stop on to all ranks; requeue at the last moment, saved or not."""
        if self.stop is None:
            self._look_for_a_stop()
        elif not self.requeued and self._left() < _LAST_MOMENT:
            self.requeued = True  # Slurm requeues a job that it preempts, but not one that ran out of time
            with contextlib.suppress(SlurmError):
                self._ask(lambda: ending.requeue_now(self.job_id, patience=_LAST_MOMENT))
        # After the ranks know: the process that it starts has to be read from a file system that may be slow.
        if self.flag.requested is not None and not self.unholding:
            self.unholding = True  # Slurm ends this process soon, and requeues the job itself
            ending.unhold_later(self.job_id, [])

    def _look_for_a_stop(self) -> None:
        states = self.server.ranks.values()
        signalled = next((state for state in states if state.signal is not None), None)
        if signalled is not None:
            self.server.poll(_POLL)  # messages that came at the same time
            gone = any(state.lost or state.outcome in ("failed", "refused") for state in states)
            if gone or task_failed(self.log):
                return  # a rank is gone, and srun signals the others for it
        save = max((state.save_seconds for state in states), default=0.0)
        lead = max(float(self.config.slurm.signal_seconds), 2 * save + _LAST_MOMENT)
        asked = (self.job_dir / srun.CANCEL).exists()
        due = asked or signalled is not None or self.flag.requested is not None
        if not due and self._left() > lead:
            return
        job = None if asked else self._job()
        if job is not None:
            self.end_time = job.end_time  # it may have been changed since
        if not due and self._left() > lead:
            return
        self.stop = "cancelled" if asked else self._why(job, self._left() <= lead)
        if self.stop == "cancelled":
            self.end_time = None  # it has no last moment, at which it would be requeued
        signals = [state.signal for state in states if state.signal is not None]
        if self.stop == "stopped" and self.flag.requested is None and all(one.startswith(MEMORY) for one in signals):
            self.stop, _, self.detail = signals[0].partition(": ")
        got = f"rank {signalled.rank} got {signalled.signal}" if signalled else self.flag.name or ""
        source = self.detail or got
        say(f"{self.stop}{f' ({source})' if source else ''}: the ranks stop at the next safe point and save")
        self.server.stop(self.stop, self.end_time)

    def _left(self) -> float:
        """Return the seconds until Slurm ends the job; infinity if that is not known."""
        return math.inf if self.end_time is None else self.end_time - time.time()

    def _why(self, job: commands.Job | None, out_of_time: bool) -> str:
        """Return why the ranks must stop. `job`: what Slurm says of it, if it answered."""
        if job is not None:
            if job.state.startswith("CANCELLED"):
                return "cancelled"
            if job.preempt_time is not None and job.preempt_time >= (job.start_time or 0.0):
                return "preempted"
            notice = self.config.slurm.signal_seconds + 60.0
            out_of_time |= job.end_time is not None and time.time() > job.end_time - notice
        return "time limit" if out_of_time else "stopped"

    def _job(self) -> commands.Job | None:
        """Return what Slurm says of this job; None without an answer."""
        with contextlib.suppress(SlurmError):
            return self._ask(lambda: commands.job(self.job_id, patience=_ANSWER))
        return None

    def _node(self, rank: int) -> str:
        if self.nodes is None:
            self.nodes = []
            with contextlib.suppress(SlurmError):
                self.nodes = [node for part in self._ask(commands.allocation) for node in part]
        place, _ = node_of(self.config, rank)
        listed = ",".join(environment.of_components("SLURM_JOB_NODELIST"))
        return self.nodes[place] if place < len(self.nodes) else f"node {place} of {listed}"

    def _ask(self, question: Callable[[], T]) -> T:
        """Return Slurm's answer to a question. Raises SlurmError if there is none within _ANSWER seconds.

        The question is asked in a thread, which goes on, and the ranks are listened to: a controller that is away must
        keep neither a failed attempt from ending nor a stop from reaching the ranks.
        """
        answers: list[T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="ask slurm", daemon=True)
        thread.start()
        deadline = time.monotonic() + _ANSWER
        while thread.is_alive() and time.monotonic() < deadline:
            self.server.poll(_POLL / 10)
        if errors:
            raise errors[0]
        if not answers:
            raise SlurmError(f"Slurm did not answer within {_ANSWER:.0f} s")
        return answers[0]

    def _end(self, step: subprocess.Popen[bytes]) -> None:
        """Let every rank write its stacks, then end the step, whatever its processes ignore.

        Slurm is asked in a thread, so that a controller which does not answer keeps nothing waiting.
        """
        names = commands.in_components({state.step for state in self.server.ranks.values() if state.step})
        threading.Thread(target=_cancel_steps, args=(names,), name="scancel", daemon=True).start()
        if self._wait(step, _STACKS + _ENDING):
            return
        for number in (signal.SIGTERM, signal.SIGKILL):  # srun ends its tasks at the first
            with contextlib.suppress(ProcessLookupError):
                step.send_signal(number)
            if self._wait(step, _LEAVING):
                return
        say(f"srun: {immortal(step.pid)}")

    def _wait(self, step: subprocess.Popen[bytes], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while step.poll() is None and time.monotonic() < deadline:
            self.server.poll(_POLL)
        return step.poll() is not None


def _cancel_steps(names: Collection[str]) -> None:
    """Have the processes of these steps write their stacks, and Slurm end the steps after a while."""
    for signal_name in ("CONT", "ABRT"):  # a stopped process could not write them
        for name in names:
            with contextlib.suppress(SlurmError):
                commands.signal_step(name, signal_name)
    time.sleep(_STACKS)
    for name in names:
        with contextlib.suppress(SlurmError):
            commands.cancel(name)


@contextlib.contextmanager
def _patient_lock(run: RunDir, job_id: str) -> Iterator[Lock]:
    """Hold the lock of the run, and wait for it if its holder is about to go.

    This is so if the same job holds it, from an earlier start on a node that was lost, or if the holder has no attempt:
    then it is ``submit``, which may still be busy when the job that it handed in begins.
    """
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
    """Return the address on which ranks reach this process; the loopback one if all of them are on this node."""
    name = os.environ.get("SLURMD_NODENAME")
    if nodes == 1 or name is None:
        return "127.0.0.1"
    return str(socket.getaddrinfo(commands.node_address(name), None, socket.AF_INET)[0][4][0])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
