"""Notices to all ranks while they generate: "every group is finished", "stop", "join a sync".

Each has a number in the store of the job, so all ranks read them in one order. Ranks look every POLL_SECONDS, and not
all at one place: a rank of each node copies new notices from the store of the job into a store of the node, and the
others look there. So the store of the job answers once per node, and more rarely where there are thousands of nodes. A
look reads only what is new, however many notices there have been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gspo_hpc.rollout.node_store import COUNT, NodeStore, find
from gspo_hpc.system.progress import waiting

POLL_SECONDS = 0.05
_LOOKS_PER_SECOND = 20_000.0  # that the store of the job answers, however many nodes there are


@dataclass(frozen=True)
class NodeTopology:
    """The place of a rank among nodes: what it needs to know to look up notices."""

    local_rank: int = 0
    ranks_per_node: int = 1
    nodes: int = 1


class Notices:
    """The notices that this rank has read, by kind. Every rank makes one.

    Methods that look raise NoticesLost, on every rank of a node, once notices no longer reach it.
    """

    def __init__(
        self,
        store: dist.Store,
        place: NodeTopology | None = None,
        interval: float = POLL_SECONDS,
        patience: float = 30.0,
    ) -> None:
        """Take the store of the job; with several nodes, ranks of one node meet at a store of their own.

        `patience`: seconds for which the store of the job may give the node no answer.
        """
        self._store, self._place, self._interval = store, place or NodeTopology(), interval
        self._node: NodeStore | None = None
        if self._place.nodes > 1:
            slowest = max(interval, self._place.nodes / _LOOKS_PER_SECOND)
            self._node = NodeStore(store, self._place.local_rank, self._place.ranks_per_node, slowest, patience)
        self._count = 0
        self._texts: dict[str, list[str]] = {}  # by kind
        self._next_look = 0.0

    def post(self, kind: str, text: str = "") -> None:
        """Tell all ranks, and return when this rank has read it, too."""
        number = self._store.add(COUNT, 1)
        self._store.set(f"{COUNT}/{number}", f"{kind}\n{text}")
        while self.look(at_once=True) < number:
            time.sleep(self._interval)

    def look(self, *, at_once: bool = False) -> int:
        """Return how many notices this rank has read; `at_once`: look even if it has looked a moment ago."""
        if at_once or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._interval
            for notice in self._unread():
                kind, _, text = notice.partition("\n")
                self._texts.setdefault(kind, []).append(text)
                self._count += 1
        return self._count

    def _unread(self) -> Iterator[str]:
        if self._node is not None:
            yield from self._node.read()
            return
        while (found := find(self._store, self._count + 1)) is not None:
            yield found

    def has(self, kind: str) -> bool:
        """Return True once this rank has read a notice of this kind."""
        self.look()
        return kind in self._texts

    def texts(self, kind: str, *, at_once: bool = False) -> Sequence[str]:
        """Return the texts of all notices of a kind so far, in their order; `at_once`: see :meth:`look`."""
        self.look(at_once=at_once)
        return self._texts.get(kind, ())

    def forget(self, *kinds: str) -> None:
        """Forget what this rank has read of some kinds, which nobody posts any more."""
        for kind in kinds:
            self._texts.pop(kind, None)

    def wait(self, seen: int, interrupted: Callable[[], bool]) -> None:
        """Return once this rank has read more than `seen` notices, or `interrupted` returns True.

        Meanwhile the rank counts as one that waits for others, and not as one that moves on: where all wait, because a
        notice never came, those who watch them see it.
        """
        with waiting():
            while self.look() <= seen and not interrupted():
                time.sleep(self._interval)

    def arrive(self, name: str) -> bool:
        """Count this rank, and return True on the last of all ranks: ranks count on their node, then nodes."""
        place = self._place
        if self._node is None:
            return self._store.add(name, 1) == place.ranks_per_node
        return self._node.count(name) == place.ranks_per_node and self._store.add(name, 1) == place.nodes

    def close(self) -> None:
        """Stop copying notices. Calling it again does nothing."""
        if self._node is not None:
            self._node.close()
