"""No process of a run outlives the run: children that die with their parent, and a guard that finds the rest by a mark.

Floor 1. Linux only. ``python -m gspo_hpc.orphans RUN_ID ATTEMPT`` is the guard: it waits for the end of its standard
input, which comes when its launcher is done or killed, and then ends every process that is left of that attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gspo_hpc import leftovers

MARK = "GSPO_HPC_MARK"  # environment variable of every process of a run: RUN_ID:ATTEMPT
PARENT = "GSPO_HPC_PARENT"  # process id of the launcher that started this rank
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """The kernel sends this process SIGKILL once its parent is gone; at once, if that has happened already.

    `parent`: the process id the parent is known to have; default: what the launcher left in the environment, if it was
    one. To be called first thing in the child. It counts the end of the *thread* that started this process: start
    children from a thread that stays.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is None and PARENT in os.environ:
        parent = int(os.environ.pop(PARENT))  # it is not the parent of this process's own children
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def mark(run_id: str, attempt: int) -> Mapping[str, str]:
    """Environment by which :func:`kill_marked` knows the processes of an attempt, to the last grandchild."""
    # Without SPT_NOENV, setproctitle, which vLLM uses, overwrites the environment that /proc shows.
    return {MARK: f"{run_id}:{attempt}", "SPT_NOENV": "1"}


def marked(run_id: str, attempt: int | None = None, but: int | None = None) -> list[int]:
    """Process ids, on this host, of this user, that belong to a run, to one attempt of it, or to all `but` one; never
    this process."""
    wanted = f"{MARK}={run_id}:{'' if attempt is None else attempt}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                environment = (path / "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            marks = [e for e in environment.split(b"\0") if e.startswith(wanted)]
            if marks and (attempt is None or wanted in marks) and f"{MARK}={run_id}:{but}".encode() not in marks:
                found.append(int(path.name))
    return found


def kill_marked(run_id: str, attempt: int | None = None, seconds: float = 10.0, *, but: int | None = None) -> int:
    """SIGKILL every process of a run, of one attempt, or of all `but` one, until none is left; how many there were. For
    more than one attempt, the caller runs under the run's lock: none of them can be of use. Raises TimeoutError if one
    does not go within `seconds`."""
    deadline = time.monotonic() + seconds
    seen: set[int] = set()
    while left := marked(run_id, attempt, but):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} of this run do not end, not even by SIGKILL (a hung device or disk?)")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            seen.add(pid)
        time.sleep(0.02)
    return len(seen)


@contextlib.contextmanager
def guarded(run_id: str, attempt: int) -> Iterator[None]:
    """After this block no process with this :func:`mark` is left, even if this process is killed inside it."""
    guard = start_guard(run_id, attempt)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def start_guard(run_id: str, attempt: int) -> subprocess.Popen[bytes]:
    """The guard of an attempt: it acts when its standard input ends, at the latest with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "gspo_hpc.orphans", run_id, str(attempt)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
        env={key: value for key, value in os.environ.items() if key != MARK},
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    try:
        kill_marked(sys.argv[1], int(sys.argv[2]))
        leftovers.sweep(sys.argv[1], [int(sys.argv[2])])
    except TimeoutError as error:
        sys.exit(str(error))
