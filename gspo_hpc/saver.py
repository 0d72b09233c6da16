"""Checkpoints that are written while training goes on.

Floor 3. What is to be saved is copied at once; a thread writes the copy, with collectives of a group of its own, and on
rank 0 commits it. One save is under way at a time: the next one waits for it, and so does the end of a run. What went
wrong in the thread is raised where the loop next looks.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from gspo_hpc import checkpoint
from gspo_hpc.commit import Entry
from gspo_hpc.policy import Policy

_NICENESS = 10  # about a tenth of the cores that are wanted by both


class Saver:
    """Saves the checkpoints of one attempt. All ranks make one, and call :meth:`save` together."""

    def __init__(self, policy: Policy, *, background: bool = True) -> None:
        self.seconds = 0.0  # that the last whole save took, from the copy to the commit
        self._copies = checkpoint.Copies()
        self._policy, self._background = policy, background
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save", initializer=_step_back if background else None)
        self._under_way: Future[None] | None = None
        self._checked = False

    def save(self, staging: Path, commit: Callable[[Mapping[str, Entry]], None]) -> None:
        """Save the state as it is now into `staging`, once the save before is done; raises what that one failed with.

        `commit` is called on rank 0, in the thread, when all ranks have written, with what is in their shards. Where
        anything fails, what was written is removed, and nothing is committed.
        """
        self.wait()
        began = time.monotonic()
        first = self._policy.ranks.rank == 0
        try:
            write = checkpoint.prepare(self._policy, staging, self._group, self._copies, check=not self._checked)
        except BaseException:
            _remove(staging, first)
            raise
        self._checked = True

        def work() -> None:
            try:
                entries = self._gather(write())
                if first:
                    commit(entries)
            except BaseException:
                _remove(staging, first)
                raise
            self.seconds = time.monotonic() - began

        self._under_way = self._thread.submit(work)
        if not self._background:
            self.wait()

    def _gather(self, mine: dict[str, Entry]) -> dict[str, Entry]:
        """What all ranks have written, on rank 0."""
        first = self._policy.ranks.rank == 0
        of_all: list[dict[str, Entry]] | None = [{}] * dist.get_world_size() if first else None
        dist.gather_object(mine, of_all, group=self._group)
        return {name: entry for entries in of_all or () for name, entry in entries.items()}

    def check(self) -> None:
        """Raise what a save failed with that is over by now."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Until no save is under way. Raises what it failed with, or TimeoutError after `seconds`."""
        if self._under_way is not None:
            self._under_way.result(seconds)
            self._under_way = None


def _step_back() -> None:
    """Where training wants the cores, this thread and those it starts wait. When training waits, they have them all."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _remove(staging: Path, mine: bool) -> None:
    if mine:  # a full disk needs the room
        shutil.rmtree(staging, ignore_errors=True)
