"""A process that runs one program: it starts it on a rung, watches its limits, ends all of it, and says what it did.

It reads a job as a line of JSON from standard input, and writes what came of it to standard output. Whoever started it
keeps its standard input open: when that ends, so does the program. Every process of the program is a descendant of this
one and stays one (it adopts orphans), and it does not answer before all of them are gone. A guard, which is a process
of its own, ends the program and removes its folder where this one is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from gspo_hpc.sandbox import folder as folders
from gspo_hpc.sandbox import jails, kernel, seccomp, starting, usage
from gspo_hpc.sandbox.jails import Job
from gspo_hpc.sandbox.outcomes import Limit, Limits, Outcome, SandboxError, told_limit

_TICK = 0.02  # seconds between two looks at what the program uses
_KILL_SECONDS = 10.0  # in which processes that get SIGKILL must be gone
_CHUNK = 1 << 16
_BURIAL_SECONDS = 0.01  # beyond those of a look, that orphans take between two looks at most
_STOP_SECONDS = 0.5  # in which processes must stop


class _Abandoned(Exception):
    """Nobody waits for the answer any more."""


class _Program:
    """A program that runs."""

    def __init__(self, job: Job, folder: str | None) -> None:
        self.job, self.folder = job, folder
        self.began, self._meter = time.monotonic(), usage.Meter()
        self.guard, self._guarded = _start_guard(folder)
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        self.out, self.error, self._status = (reading for reading, _ in ends)
        self.output = {self.out: bytearray(), self.error: bytearray()}  # by the end of its pipe that is read
        here, there = starting.channel()
        self.pid = os.fork()
        if self.pid == 0:
            _become(job, folder, there, *(writing for _, writing in ends))
        for _, writing in ends:
            os.close(writing)
        there.close()
        os.write(self._guarded, f"{self.pid}\n".encode())
        with here:
            self._asked = starting.questions(here)
        self._tasks = 1  # those of the last count, and all that were started since

    def processes(self) -> list[int]:
        """Return the processes of the program, and those that confine it."""
        roots = [child for child in usage.children(os.getpid()) if child != self.guard]
        return [*roots, *(process for root in roots for process in usage.below(root))]

    def excess(self) -> Limit | None:
        """Return the limit that the program is beyond."""
        limits = self.job.limits
        if time.monotonic() - self.began > limits.seconds:  # first: the looks at many processes take long
            return "seconds"
        processes = self.processes()
        if len(processes) > self._most():  # and none of them is looked at, which would take long
            return "processes"
        used = self._meter.look(processes)
        if used.tasks > self._most():
            return "processes"
        if used.memory > limits.memory_bytes:
            return "memory_gb"
        if used.cpu_seconds > limits.cpu_seconds:
            return "cpu_seconds"
        return "disk_mb" if self._disk(used.processes) > limits.disk_bytes else None

    def _most(self) -> int:
        """Return the number of tasks that there may be."""
        return self.job.limits.processes + jails.OVERHEAD[self.job.kind]

    def _permit(self, asked: int) -> Limit | None:
        """Let a process start another, or a thread; return the limit where that would be one too many."""
        if (one := starting.question(asked)) is None:
            return None
        if self._tasks >= self._most():
            self._ended(_BURIAL_SECONDS)
            self._tasks = self._meter.look(self.processes()).tasks
            if self._tasks >= self._most():
                return "processes"
        self._tasks += 1
        starting.permit(asked, one)
        return None

    def _disk(self, processes: list[int]) -> int:
        most = self.job.limits.disk_bytes
        if self.folder is None:
            return _in_memory(processes)
        try:
            try:
                named = folders.used(self.folder, most, moving=True)
            except folders.Changed:
                with _stopped(self.processes):
                    named = folders.used(self.folder, most)
        except (folders.TooFar, folders.Changed):
            return most + 1
        mapped = folders.mapped(processes, self.folder, self.job.limits.file_bytes)
        return named + folders.unnamed(processes, os.stat(self.folder).st_dev, mapped)

    def follow(self) -> Limit | None:
        """Wait until the program ends, or is beyond a limit, which is returned. Raises _Abandoned."""
        wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        looked, took, sources = time.monotonic(), 0.0, [0, wake, self.out, self.error]
        if self._asked is not None:
            sources.append(self._asked)
        while not self._ended(took + _BURIAL_SECONDS):
            if time.monotonic() - looked >= _TICK:
                began, limit = time.monotonic(), self.excess()
                if limit is not None:
                    return limit
                looked = time.monotonic()
                took = looked - began
            for ready in select.select(sources, [], [], _TICK)[0]:
                if ready == self._asked:
                    if (limit := self._permit(ready)) is not None:
                        return limit
                    continue
                data = os.read(ready, _CHUNK)
                if ready == 0 and not data:
                    raise _Abandoned
                if ready in self.output:
                    self.output[ready] += data
                    if not data:
                        sources.remove(ready)
                    elif len(self.output[ready]) > self.job.limits.output_bytes:
                        return "output_kb"
        return None

    def _ended(self, seconds: float) -> bool:
        """Tell whether the first process has ended, which keeps its number until it is waited for; bury orphans.

        That ends after so many seconds: a program may make orphans faster than they can be buried.
        """
        if os.waitid(os.P_PID, self.guard, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise SandboxError("the guard of a sandbox was killed")
        until = time.monotonic() + seconds
        while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in (self.pid, self.guard) or time.monotonic() > until:
                return False
            os.waitpid(found.si_pid, 0)
        return True

    def end(self) -> int:
        """End every process of the program; return the exit status of the first. Raises SandboxError."""
        status, deadline = None, time.monotonic() + _KILL_SECONDS
        if self._asked is not None:
            os.close(self._asked)  # from here on nothing can be started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # at once, so that none can start another
        # What lies below a child that ends becomes a child: of many processes it would take long to look for it.
        while left := [child for child in usage.children(os.getpid()) if child != self.guard]:
            groups = {0, os.getpgrp()}
            for child in left:
                found, code = os.waitpid(child, os.WNOHANG)
                if found == self.pid:
                    status = os.waitstatus_to_exitcode(code)
                if found:
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
                    if (group := os.getpgid(child)) not in groups:
                        groups.add(group)
                        os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SandboxError(f"{len(left)} processes of a program do not end, not even on SIGKILL: {left[:8]}")
            time.sleep(0.0005)
        for pipe, data in self.output.items():  # what was written before the end; nobody writes any more
            while len(data) <= self.job.limits.output_bytes and (more := os.read(pipe, _CHUNK)):
                data += more
        assert status is not None
        return status

    def release(self) -> None:
        """Send the guard home: the program is over, and its folder removed."""
        os.kill(self.guard, signal.SIGKILL)
        os.waitpid(self.guard, 0)

    def refusal(self) -> str:
        """Return why the program was not started; empty if it was. Call it at the end."""
        told = b""
        while more := os.read(self._status, _CHUNK):
            told += more
        text = told.decode("utf-8", "replace")
        if self.job.kind != "bubblewrap" or text.startswith("cannot"):
            return text
        return "" if '"exit-code"' in text else "bubblewrap could not start it"


@contextlib.contextmanager
def _stopped(processes: Callable[[], list[int]]) -> Iterator[None]:
    """Stop processes, and those that they start meanwhile; let them go on at the end, but for those that had stopped.

    One that cannot be stopped, because it waits for a disk, goes on no further than its system call.
    """
    before = {one for one in processes() if usage.is_in(one, usage.STOPPED)}
    ours: set[int] = set()
    deadline, quiet = time.monotonic() + _STOP_SECONDS, 0
    try:
        while quiet < 2 and time.monotonic() < deadline:  # the second look is for those that another made go on
            left = [
                one
                for one in processes()
                if one not in before and not (one in ours and usage.is_in(one, usage.STOPPED + usage.IN_THE_KERNEL))
            ]
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            ours.update(left)
            quiet = 0 if left else quiet + 1
        yield
    finally:
        for process in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def _in_memory(processes: list[int]) -> int:
    """Return the bytes that the program's own folder holds, where bubblewrap keeps it in memory."""
    for process in reversed(processes):  # the program, and not bubblewrap, which has another root
        with contextlib.suppress(OSError):
            place = os.statvfs(f"/proc/{process}/root{jails.INSIDE}")
            if place.f_files:
                return (place.f_blocks - place.f_bfree) * place.f_frsize + (place.f_files - place.f_ffree) * 4096
    return 0


def _become(job: Job, folder: str | None, questions: socket.socket, out: int, error: int, status: int) -> None:
    """Turn this process, which was just forked, into the program. Does not return."""
    try:
        parent = os.getppid()
        os.setsid()
        kernel.die_with(parent)
        for name in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError):  # those that libc keeps for itself
                signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to go where the machine has no memory left
        starting.ask(job, questions)
        with open("/proc/loadavg") as file:
            tasks = int(file.read().split()[3].partition("/")[2])
        filtered = seccomp.program(os.uname().machine, None) if job.kind == "bubblewrap" else b""
        given = [_sealed(job.stdin.encode()), out, error]
        given += [_sealed(filtered), _sealed(job.program.encode()), status] if job.kind == "bubblewrap" else []
        # First above the numbers that they get, so that none is overwritten; all others close when the program starts.
        status, *given = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 16) for one in (status, *given))
        for number, one in enumerate(given):
            os.dup2(one, number)
        command, variables = jails.prepare(job, folder, tasks)
        os.execve(command[0], command, variables)
    except BaseException as problem:
        os.write(status, f"cannot confine it: {problem}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _sealed(data: bytes) -> int:
    """Return a file without a name that holds `data` and that nobody can change."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    return file


def _start_guard(folder: str | None) -> tuple[int, int]:
    """Start the guard; return its process id, and the pipe that tells it the program's and whose end it waits for."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    guard = os.fork()
    if guard:
        os.close(reading)
        return guard, writing
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.dup2(reading, 0)
        os.closerange(1, 64)
        told = b""
        while data := os.read(0, 64):
            told += data
        if told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(told), signal.SIGKILL)
        if folder is not None:
            deadline = time.monotonic() + _KILL_SECONDS
            while os.path.isdir(folder) and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    folders.remove(folder)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _own_folder(job: Job) -> Iterator[str | None]:
    """Make the program's own folder with the program in it; remove it at the end. Bubblewrap has one in memory."""
    if job.kind == "bubblewrap":
        yield None
        return
    path = os.path.join(job.temporary, f"gspo-sandbox-{os.urandom(8).hex()}")
    os.mkdir(path, 0o700)
    try:
        with open(os.path.join(path, jails.PROGRAM), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(job.program)
        yield path
    finally:
        folders.remove(path)


def supervise(job: Job) -> Outcome:
    """Run the program of a job; return what it did. Raises SandboxError or OSError where it was not run."""
    kernel.adopt_orphans()
    with _own_folder(job) as folder:
        program = _Program(job, folder)
        try:
            limit = program.follow()
        finally:
            status = program.end()
            seconds = time.monotonic() - program.began
        why = program.refusal()
        most = job.limits.output_bytes
        out, error = (bytes(data[:most]).decode("utf-8", "replace") for data in program.output.values())
        if why and limit is None:
            raise SandboxError(f"the program was not run: {why}{f': {error.strip()}' if error.strip() else ''}")
        if job.kind == "apptainer" and limit is None and status == 255 and "FATAL" in error:
            raise SandboxError(f"the program was not run: {error.strip()}")
    program.release()
    if limit is None:
        if job.kind != "landlock" and status > 128:  # bubblewrap's and apptainer's word for a signal
            status = 128 - status
        return Outcome(out, error, status, told_limit(status, error), seconds)
    return Outcome(out, error, None, limit, seconds)


def main() -> int:
    """Run the job that standard input names, and answer on standard output."""
    answer: dict[str, Any]
    try:
        asked = json.loads(sys.stdin.buffer.readline())
        job = Job(**{**asked, "limits": Limits(**asked["limits"]), "readable": tuple(asked["readable"])})
        answer = asdict(supervise(job))
    except _Abandoned:
        return 1
    except (OSError, SandboxError, ValueError) as problem:
        answer = {"error": str(problem)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
