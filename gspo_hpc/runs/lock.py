"""The lock of a run directory: one process at a time runs it, and everybody can read which."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from gspo_hpc.system.environment import slurm_job_id
from gspo_hpc.system.files import open_private, plain_disk_full, write_all
from gspo_hpc.system.text import parse_json

_LOCKED = (errno.EAGAIN, errno.EACCES)
_PATIENCE = 1.0  # seconds: a reader that asks who runs it holds the lock for an instant


class Lock:
    """The lock of a run, which one process holds.

    An exclusive flock on the file `lock`, which the kernel drops with the process, however that ends: a lock left by a
    killed process is simply free (unless a forked child that executed nothing lives on). The content only says who
    holds it. On NFS (Linux) flock is a lock on the server and keeps other hosts out too; mounted with local_lock or
    nolock, and on Lustre with localflock, it holds on one host only; a file system without locks is refused.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _PATIENCE
        try:
            while not _try_lock(fd, path):
                if time.monotonic() > deadline:
                    raise ValueError(_held(path, _holder(fd)))
                time.sleep(0.05)
            if os.fstat(fd).st_nlink == 0:  # its holder could not submit the run, and removed what it had made
                raise ValueError(f"{path.parent} was removed a moment ago: give the command again")
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._path = path
        self.describe(None)

    def describe(self, attempt: int | None) -> None:
        """Write into the lock which attempt runs."""
        assert self._fd is not None, "the lock is closed"
        content = json.dumps(who() | {"attempt": attempt, "since": now()}) + "\n"
        with plain_disk_full(self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, content.encode())

    def close(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def holder(path: Path) -> dict[str, Any] | None:
    """Return who holds the lock `path` right now (host, pid, attempt, job, since), or None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return _holder(fd)
    finally:
        os.close(fd)
    return None


def now() -> str:
    """Return the time as records of a run have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        raise ValueError(
            f"{path}: this file system has no file locks ({error.strerror}); put run.dir on one that has them, or "
            "mount this one with file locks (Lustre: -o flock)"
        ) from None
    return True


def _holder(fd: int) -> dict[str, Any]:
    try:
        content = parse_json(os.pread(fd, 4096, 0))
    except ValueError:
        return {}  # taken this instant, not described yet
    return content if isinstance(content, dict) else {}


def _held(path: Path, who: Mapping[str, Any]) -> str:
    job = f", Slurm job {who['slurm_job_id']}" if who.get("slurm_job_id") else ""
    known = (
        f"process {who.get('pid')} on {who.get('host')}{job}, attempt {who.get('attempt')}, since {who.get('since')}"
    )
    return f"{path.parent} is running already: {known if who else 'by a process that has just started'}"


def who() -> dict[str, Any]:
    """Return where this process is: host, pid and Slurm job."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job_id": slurm_job_id()}
