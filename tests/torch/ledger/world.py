"""Ranks as threads of one process, and the collectives between them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gspo_hpc.system import progress


class Peers:
    """The counterpart of EnginePeers."""

    def __init__(self, group: World, place: int) -> None:
        self._group, self._place = group, place

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all, in order. Collective."""
        self._group.enter(self._place)
        return self._group.gather(payload)

    def wait(self) -> None:
        """Return when all have come here. Collective."""
        self.gather(b"")


class World:
    """A number of ranks. Random delays let every rank be early once and late another time."""

    def __init__(self, size: int, seed: int, delay: float = 0.001) -> None:
        self.size, self._delay = size, delay
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size
        self._here = threading.local()
        self._groups: dict[int, World] = {}  # of neighbours, by the first
        self._random = random.Random(seed)

    @property
    def rank(self) -> int:
        """The rank of the thread that asks."""
        return int(self._here.rank)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on every rank; raise the first error of any, once all have ended."""
        errors: list[BaseException] = []
        # One thread runs at a time, as Python has it: on several processors a third of the time went into waking them.
        processor = {self._random.choice(sorted(os.sched_getaffinity(0)))}

        def one(rank: int) -> None:
            os.sched_setaffinity(0, processor)  # of this thread
            self._here.rank = rank
            try:
                work()
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.append(error)
                self.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        progress._excuse = None  # threads that begin and end to wait in turns leave the excuse of one of them
        if errors:
            raise errors[0]
        assert not self._barrier.broken, "ranks waited for each other for too long"

    def enter(self, rank: int) -> None:
        """Have the thread that asks be a rank."""
        self._here.rank = rank

    def dawdle(self) -> None:
        """Take a moment, of random length; end where another rank has failed."""
        if self._barrier.broken:
            raise threading.BrokenBarrierError
        if self._delay:
            time.sleep(self._random.random() * self._delay)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def largest(self, tensor: torch.Tensor, *unused: Any) -> None:
        """Have the tensor hold the largest values of all ranks. Collective."""
        tensor.copy_(torch.stack(self.gather(tensor.clone())).amax(0))

    def add(self, tensor: torch.Tensor, *unused: Any) -> None:
        """Have the tensor hold the sums over all ranks. Collective."""
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))

    def abort(self) -> None:
        """End all waiting, now and later."""
        for group in (self, *self._groups.values()):
            group._barrier.abort()

    def wait(self, *unused: Any) -> None:
        """Return when all ranks have come here. Collective."""
        self.gather(None)

    def peers(self, size: int) -> Peers:
        """Return this rank's place among the `size` neighbours that share an engine."""
        first = self.rank // size * size
        group = self._groups.setdefault(first, World(size, 0))
        if self._barrier.broken:  # a rank has ended, and will not come
            group._barrier.abort()
        return Peers(group, self.rank - first)

    def any(self, flag: bool, *unused: Any) -> bool:
        """Return True if it is true on any rank. Collective."""
        return any(self.gather(flag))

    def first(self, value: Any, *unused: Any) -> Any:
        """Return the value of rank 0. Collective."""
        return self.gather(value)[0]
