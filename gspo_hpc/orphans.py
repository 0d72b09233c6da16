"""No process of a run outlives the run: children that die with their parent, and leftovers found by a mark.

Floor 1. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

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


def marked(run_id: str) -> list[int]:
    """Process ids, on this host, of this user, that belong to any attempt of a run; never this process."""
    wanted = f"{MARK}={run_id}:".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                environment = (path / "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if any(entry.startswith(wanted) for entry in environment.split(b"\0")):
                found.append(int(path.name))
    return found


def kill_marked(run_id: str, seconds: float = 10.0) -> int:
    """SIGKILL every process of a run until none is left; how many there were. The caller holds the run's lock, so
    none of them can be of use. Raises TimeoutError if one does not go within `seconds`."""
    deadline = time.monotonic() + seconds
    seen: set[int] = set()
    while left := marked(run_id):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} of this run do not end, not even by SIGKILL (a hung device or disk?)")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            seen.add(pid)
        time.sleep(0.02)
    return len(seen)
