"""End every process of a run with the run: children die with their parent, and a guard finds the rest by a mark.

Linux only. ``python -m gspo_hpc.system.processes RUN_ID ATTEMPT`` is the guard. It waits for the end of its standard
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

from gspo_hpc.system import environment, leftovers
from gspo_hpc.system.environment import MARK, PARENT

KILL_SECONDS = 10.0  # in which processes that get SIGKILL must be gone

_PR_SET_PDEATHSIG = 1
_GUARD_SECONDS = KILL_SECONDS + 2.0  # a guard ends: it also removes files that its processes left


def die_with_parent(parent: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal once its parent is gone; at once, if that has happened already.

    `parent` is the process id of the parent; by default the one that a launcher put into the environment, if it did.
    Call this first in the child. What counts is the end of the *thread* that started this process: start children from
    a thread that stays.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is None and PARENT in os.environ:
        parent = int(os.environ.pop(PARENT))  # this process's own children have another parent
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), by)


def end_children_with_this_process() -> None:
    """Have every process that this one starts from here on end with it, however it ends.

    This process leads a process group from now on. Its first child does nothing but wait for its death, and then sends
    SIGKILL to what is left of the group. Processes that make a session of their own escape.
    """
    os.setpgid(0, 0)
    leader = os.getpid()
    if os.fork() != 0:
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those for the group are for the others in it
        os.closerange(0, 1 << 20)  # who waits for the end of a pipe must not wait for this process
        die_with_parent(leader, by=signal.SIGTERM)
        while os.getppid() == leader:
            signal.sigwait({signal.SIGTERM})
        os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def mark(run_id: str, attempt: int) -> Mapping[str, str]:
    """Return the variables by which :func:`kill_marked` finds all processes of an attempt, grandchildren included."""
    # Without SPT_NOENV, setproctitle, which vLLM uses, overwrites the environment that /proc shows.
    return {MARK: f"{run_id}:{attempt}", "SPT_NOENV": "1"}


def marked(run_id: str, attempt: int | None = None, but: int | None = None) -> list[int]:
    """Return the ids of this user's processes on this host that belong to a run, without this process.

    `attempt`: only those of this attempt; `but`: those of all other attempts.

    A process in a user namespace of its own, as a container may have it, finds only those in it; one on the host all.
    """
    wanted = f"{MARK}={run_id}:{'' if attempt is None else attempt}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            try:
                environment = (path / "environ").read_bytes()
            except OSError:  # it is gone, or in a container, or another user's
                continue
            marks = [e for e in environment.split(b"\0") if e.startswith(wanted)]
            if marks and (attempt is None or wanted in marks) and f"{MARK}={run_id}:{but}".encode() not in marks:
                found.append(int(path.name))
    return found


def kill_marked(
    run_id: str, attempt: int | None = None, seconds: float = KILL_SECONDS, *, but: int | None = None
) -> int:
    """Send SIGKILL to every process of a run, of one attempt, or of all `but` one; return how many there were.

    For more than one attempt the caller must hold the lock of the run: then none of the processes is of use any more.
    Raises TimeoutError if one is left after `seconds`.
    """
    deadline = time.monotonic() + seconds
    seen: set[int] = set()
    while left := marked(run_id, attempt, but):
        if time.monotonic() > deadline:
            raise TimeoutError("; ".join(immortal(pid) for pid in left))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            seen.add(pid)
        time.sleep(0.02)
    return len(seen)


def immortal(pid: int) -> str:
    """Return the sentence about a process of a run that SIGKILL has not ended, with the state that the kernel shows.

    The kernel ends a process in uninterruptible sleep (state D) only when its device or disk has answered.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    state = next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
    return f"process {pid} does not end, not even on SIGKILL; its state is {state} (a hung device or disk?)"


@contextlib.contextmanager
def guarded(run_id: str, attempt: int) -> Iterator[None]:
    """End all processes with this :func:`mark` after the block, even if this process is killed inside it."""
    guard = start_guard(run_id, attempt)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself
            guard.wait(_GUARD_SECONDS)


def start_guard(run_id: str, attempt: int) -> subprocess.Popen[bytes]:
    """Start the guard of an attempt. It acts when its standard input ends, at the latest with this process."""
    return subprocess.Popen(
        environment.python("gspo_hpc.system.processes", run_id, str(attempt)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
        env={key: value for key, value in os.environ.items() if key != MARK} | environment.importing(),
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    try:
        kill_marked(sys.argv[1], int(sys.argv[2]))
        leftovers.sweep(sys.argv[1], [int(sys.argv[2])])
    except TimeoutError as error:
        sys.exit(str(error))
