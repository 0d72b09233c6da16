"""A process that calls a user's observer with the record of every step.

The observer has a process of its own so that nothing it does reaches the run: an error, an exit, a hang, memory, or the
random numbers of a library. Records go to it over a pipe. What does not fit is kept here up to a limit and then
dropped, because metrics.jsonl has every record anyhow.

``python -m gspo_hpc.training.observers.process NAME RUN_DIR FD`` is that process: it reads records from standard input
and writes its first failure to the file descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.reading import own_code
from gspo_hpc.system import environment, processes
from gspo_hpc.system.files import plain

WAITING = 2**20  # bytes of records that wait for an observer; a record has one to a few KiB
_FAILURE = 2000  # bytes of a failure that are read


class ObserverProcess:
    """The process of one observer, as rank 0 has it. No method raises for what the observer does."""

    def __init__(self, name: str, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._waiting = b""
        self._told = False
        self._failure, theirs = os.pipe()
        os.set_blocking(self._failure, False)
        command = environment.python(__name__, name, str(run_dir), str(theirs))
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(theirs,), env=os.environ | environment.importing()
            )
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        self._records = self._process.stdin.fileno()
        os.set_blocking(self._records, False)

    def give(self, record: Mapping[str, Any]) -> None:
        """Hand a record over without waiting."""
        line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > WAITING:
            self._tell("is too slow: it does not get every record")
        else:
            self._waiting += line
        self._write()
        self._look()

    def close(self, patience: float) -> None:
        """Give the observer `patience` seconds for the records that are left, and end it."""
        deadline = time.monotonic() + patience
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._records], [], left)
            self._write()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._tell(f"did not end within {patience:g} s of the last record, and was ended")
            self._process.kill()
            self._process.wait()
        self._look()
        os.close(self._failure)

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._records, self._waiting) :]
        except BlockingIOError:
            return  # the pipe is full
        except OSError:  # nobody reads it any more
            self._waiting = b""
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)

    def _look(self) -> None:
        """Tell the first failure, or that the process has ended."""
        with contextlib.suppress(BlockingIOError):
            if text := os.read(self._failure, _FAILURE).decode("utf-8", "replace").strip():
                self._tell(text)
        if (code := self._process.poll()) not in (None, 0):
            self._tell(f"ended its process with {'exit code' if code > 0 else 'signal'} {abs(code)}")

    def _tell(self, failure: str) -> None:
        if not self._told:
            self._told = True
            self._warn(f"observer {self._name} {failure}; training goes on without regard to it")


def main(argv: Sequence[str]) -> int:
    """Call the observer with each record that standard input has."""
    name, run_dir, told = argv
    processes.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job, while the last records come
        signal.signal(number, signal.SIG_IGN)
    failures = os.fdopen(int(told), "w", encoding="utf-8", buffering=1, errors="backslashreplace")
    try:
        path, function = own_code.split(name, "an observer")
        call = own_code.load(path, function)
        extra = {"run_dir": Path(run_dir)} if "run_dir" in own_code.signature(path, function).parameters else {}
    except BaseException as error:  # a user's file may raise anything, SystemExit too
        failures.write(f"cannot be loaded: {_in_a_line(error)}\n")
        return 0
    failed = False
    for line in sys.stdin:
        record = json.loads(line)
        try:
            call(record, **extra)
        except BaseException as error:
            if not failed:
                failed = True
                failures.write(f"failed at step {record['step']}: {_in_a_line(error)}\n")
    return 0


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
