"""Saves of a state that ranks share, with what may happen meanwhile."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from gspo_hpc.checkpoint import sharded, shared_optimizer
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import barrier
from gspo_hpc.system import direct_io


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Let no thread of a save that begins within copy, send or write anything before the event is set."""
    prepare, gate = sharded.prepare, threading.Event()

    def later(*arguments: Any, **options: Any) -> Callable[[], Any]:
        write = prepare(*arguments, **options)
        return lambda: (gate.wait(), write())[1]

    try:
        with mock.patch.object(sharded, "prepare", later):
            yield gate
    finally:
        gate.set()  # or a rank whose test has failed would not end


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Count the batches that travel between ranks within the block: of each the number of moves."""
    exchange, found = shared_optimizer._exchange_batch, list[int]()

    def counting(members: Any, moves: Any, *more: Any, **options: Any) -> None:
        found.append(len(moves))
        exchange(members, moves, *more, **options)

    with mock.patch.object(shared_optimizer, "_exchange_batch", counting):
        yield found


def short_of_disk(made: Policy, staging: Callable[[], Path]) -> dict[str, np.ndarray]:
    """Errors of each rank's save where rank 1's disk fills up in the middle of it, and of the next one."""
    write, writes = direct_io.Writer.write, 0

    def full(self: direct_io.Writer, content: Any) -> int:
        nonlocal writes
        writes += 1
        if made.ranks.rank == 1 and writes == 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    said = []
    for fails in (True, False):
        saver, folder, committed = Saver(made), staging(), list[str]()
        with mock.patch.object(direct_io.Writer, "write", full) if fails else contextlib.nullcontext():
            saver.save(folder, lambda known, to=committed: to.extend(known))
            try:
                saver.wait()
                said.append("done")
            except OSError as error:
                said.append(f"{type(error).__name__} {error}")
        barrier(made.ranks.device)
        if made.ranks.rank == 0:
            assert bool(committed) == folder.exists() == (not fails)
    return {"said": np.array(said)}
