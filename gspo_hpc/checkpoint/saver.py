"""Write checkpoints while training goes on.

A thread copies the state, or waits for the copy of a GPU's stream, before anything changes it. It writes the copy, with
the collectives of a process group of its own, and commits it on rank 0. Only one save is under way at a time: the next
one waits for it, and so does the end of a run. An error in the thread is raised when the loop calls the saver next.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from gspo_hpc.checkpoint import sharded
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.policy.policy import Policy
from gspo_hpc.system.files import Entry
from gspo_hpc.system.progress import following, waiting

_NICENESS = 10  # more than training's: gets about a tenth of a core that training wants too
_NICEST = 19


class Saver:
    """A writer of one attempt's checkpoints. All ranks make one, and call :meth:`save` together."""

    def __init__(
        self, policy: Policy, *, background: bool = True, reference: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Take `reference`: the weights of a reference model that have to be saved, one for each parameter."""
        self.seconds = 0.0  # wall time of the last whole save, from the copy to the commit
        self._copies = sharded.Copies(background=background)
        self._policy, self._background, self._reference = policy, background, reference
        self._group = dist.new_group(backend="gloo", timeout=policy.ranks.timeout)
        self._under_way: Future[None] | None = None
        self._checked = False

    def save(
        self,
        staging: Path,
        commit: Callable[[Mapping[str, Entry]], None],
        write_more: Callable[[], dict[str, Entry]] = dict,
    ) -> None:
        """Save the present state into `staging`, after the save before is done; raise the error that it failed with.

        `write_more` writes other files of this rank, in the thread, and returns their sizes and hashes. `commit` is
        called on rank 0, in the thread, once all ranks have written, with size and hash of their files by path. If
        anything fails, what was written is removed and nothing is committed.
        """
        self.wait()
        began = time.monotonic()
        first = self._policy.ranks.rank == 0
        try:
            write = sharded.prepare(
                self._policy,
                staging,
                self._group,
                self._copies,
                check=not self._checked,
                reference=self._reference,
            )
        except BaseException:
            _remove(staging, first)
            raise
        self._checked = True

        def work() -> None:
            try:
                _begin(self._policy.ranks.device)
                if self._background:
                    _yield_cores()
                with (
                    waiting()
                ):  # for ranks whose disks are slower, in collectives between the writes; a write says more
                    entries = self._gather(write() | write_more())
                    if first:
                        commit(entries)
            except BaseException:
                _remove(staging, first)
                raise
            self.seconds = time.monotonic() - began

        # A thread for each save: one that has lowered its priority may not raise it again. It has no initializer:
        # nobody would learn that one failed, for nothing keeps the executor.
        thread = ThreadPoolExecutor(1, "save")
        self._under_way = thread.submit(work)
        thread.shutdown(wait=False)
        if not self._background:
            self.wait()

    def _gather(self, mine: dict[str, Entry]) -> dict[str, Entry]:
        """Return what all ranks have written, on rank 0; an empty dictionary on the others."""
        found = Transport(self._group).tree_gather(json.dumps(mine).encode(), _joined)
        entries: dict[str, Entry] = {} if found is None else json.loads(found)
        return entries

    def check(self) -> None:
        """Raise the error of a save that has ended by now, if it failed."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until no save is under way. Raise the error that it failed with, or TimeoutError after `seconds`."""
        if self._under_way is not None:
            with following():
                self._under_way.result(seconds)
            self._under_way = None


def _begin(device: torch.device) -> None:
    """Let the thread work on this rank's GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread has the node's first GPU, where CUDA would begin anew


def _yield_cores() -> None:
    """Leave training the cores that it wants: no rank waits for this thread but with its own."""
    thread = threading.get_native_id()
    present = os.getpriority(os.PRIO_PROCESS, thread)  # of the whole job, where somebody has started it with nice
    os.setpriority(os.PRIO_PROCESS, thread, min(present + _NICENESS, _NICEST))


def _joined(parts: Sequence[bytes]) -> bytes:
    """Return the entries of several ranks as one JSON object; no two ranks write one file."""
    return json.dumps({name: entry for part in parts for name, entry in json.loads(part).items()}).encode()


def _remove(staging: Path, mine: bool) -> None:
    if mine:  # a full disk needs the room
        shutil.rmtree(staging, ignore_errors=True)
