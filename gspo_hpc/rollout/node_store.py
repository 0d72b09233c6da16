"""The store of a node: a file in a folder that only this user can open, kept filled from the store of the job.

One thread on the node's first rank, the relay, copies new notices into it. The other ranks of the node depend on that
thread, so it shows them that it lives: with every look at the store of the job it changes the time of a file, and an
error that ends it is written into this file. Readers look at the file's state, which asks no store anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gspo_hpc.system import environment, leftovers

COUNT = "notices"  # key of their number; each is at this key, "/" and its number
_STORE, _BEAT = "store", "beat"  # files
_GONE = timedelta(seconds=5)  # for which torch waits for the file to appear, once the first rank has removed it
_JOIN = 0.5  # seconds to wait for the relay to end
_LONGEST_GAP = 1.0  # seconds between two looks of a rank that count as silence: it may have been stopped meanwhile


class NoticesLost(RuntimeError):
    """Notices no longer reach the ranks of this node."""


class NodeStore:
    """One rank's view of its node's store."""

    def __init__(self, job: dist.Store, local_rank: int, interval: float, patience: float) -> None:
        """Open the store; the node's first rank makes it, and looks at `job` every `interval` seconds.

        `patience`: seconds without a look after which :meth:`check` raises.
        """
        self._node, self._patience = environment.node_name(), patience
        key = f"node_store/{self._node}"
        self._relay: _Relay | None = None
        if local_rank:
            self._folder = Path(job.get(key).decode())
            if not self._folder.is_dir():
                raise RuntimeError(
                    f"rank {local_rank} of node {self._node} does not see {self._folder}, which the node's first rank "
                    "made: ranks of a node must share /dev/shm; in a container, bind it"
                )
        else:
            if job.add(f"{key}/made", 1) != 1:
                raise RuntimeError(f"two nodes of this job are called {self._node}: give each a name of its own")
            self._folder = leftovers.shared_folder(os.environ.get(environment.MARK, ""))
            (self._folder / _BEAT).touch()
        self.store: dist.Store = dist.FileStore(str(self._folder / _STORE), -1)
        self.store.set_timeout(_GONE)
        self._beat, self._silent, self._looked = -1, 0.0, time.monotonic()
        if not local_rank:
            self._relay = _Relay(job, self.store, self._folder / _BEAT, interval)
            job.set(key, str(self._folder))

    def check(self) -> None:
        """Raise NoticesLost if the relay has ended with an error, or has not looked for too long."""
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        try:
            state = os.stat(self._folder / _BEAT)
            error = (self._folder / _BEAT).read_text("utf-8") if state.st_size else None
        except FileNotFoundError:
            error = "the node's first rank has closed its store, or its folder was removed or is full"
        if error is not None:
            raise NoticesLost(f"node {self._node} cannot read notices from the store of the job any more: {error}")
        if state.st_mtime_ns != self._beat:
            self._beat, self._silent = state.st_mtime_ns, 0.0
            return
        self._silent += gap
        if self._silent > self._patience:
            raise NoticesLost(
                f"the first rank of node {self._node} has not looked at the store of the job for {self._silent:.0f} s: "
                f"it hangs, or the store (on rank 0) does not answer"
            )

    def close(self) -> None:
        """Stop copying and remove the store, on the node's first rank. Calling it again does nothing."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            shutil.rmtree(self._folder, ignore_errors=True)


class _Relay:
    """A thread that copies new notices from one store to another."""

    def __init__(self, source: dist.Store, target: dist.Store, beat: Path, interval: float) -> None:
        self._source, self._target, self._beat, self._interval = source, target, beat, interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_JOIN)  # no longer: a store that does not answer holds it for ever

    def _run(self) -> None:
        copied = looks = 0
        try:
            while not self._closed.wait(self._interval):
                while (text := find(self._source, copied + 1)) is not None:
                    if os.statvfs(self._beat).f_bavail == 0:  # a torn record would hold every reader for ever
                        raise OSError(errno.ENOSPC, f"{self._beat.parent} is full")
                    copied += 1
                    self._target.set(f"{COUNT}/{copied}", text)
                looks += 1
                os.utime(self._beat, ns=(looks, looks))
        except Exception as error:  # whatever it is, all ranks of the node wait for what this thread copies
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            print(f"notices of this node are lost: {text}", file=sys.stderr, flush=True)
            try:
                self._beat.write_text(text, "utf-8")
            except OSError:  # no room is left for it
                self._beat.unlink()


def find(store: dist.Store, number: int) -> str | None:
    """Return a notice, or None if it is not there: to wait for it would keep other threads from the store."""
    key = f"{COUNT}/{number}"
    return store.get(key).decode() if store.check([key]) else None
