"""Notices to all ranks while they generate: "every group is finished", "stop", "join a sync".

Each has a number in the store of the job, so all ranks read them in one order. Ranks look every POLL_SECONDS, and not
all at one place: a rank of each node copies new notices from the store of the job into a store of the node, and the
others look there. So the store of the job answers once per node, and more rarely where there are thousands of nodes.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import torch.distributed as dist

from gspo_hpc.system import environment

POLL_SECONDS = 0.05
_LOOKS_PER_SECOND = 20_000.0  # that the store of the job answers, however many nodes there are
_COUNT = "notices"


@dataclass(frozen=True)
class NodeRank:
    """The place of a rank among nodes: what it needs to know to look up notices."""

    local_rank: int = 0
    ranks_per_node: int = 1
    nodes: int = 1


class Notices:
    """The notices that this rank has read. Every rank makes one."""

    def __init__(self, store: dist.Store, place: NodeRank | None = None, interval: float = POLL_SECONDS) -> None:
        """Take the store of the job; with several nodes, ranks of one node meet at a store of their own."""
        self._store, self._place, self._interval = store, place or NodeRank(), interval
        self._relay: _Relay | None = None
        self._near = store if self._place.nodes == 1 else self._node_store()
        self._read: list[str] = []
        self._texts: set[str] = set()
        self._next_look = 0.0

    def post(self, text: str) -> None:
        """Tell all ranks, and return when this rank has read it, too."""
        number = self._store.add(_COUNT, 1)
        self._store.set(f"{_COUNT}/{number}", text)
        while len(self.read(at_once=True)) < number:
            time.sleep(self._interval)

    def read(self, *, at_once: bool = False) -> list[str]:
        """Return all notices so far, in their order; `at_once`: look even if this rank has looked a moment ago."""
        if at_once or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._interval
            while (text := _find(self._near, len(self._read) + 1)) is not None:
                self._read.append(text)
                self._texts.add(text)
        return self._read

    def has(self, text: str) -> bool:
        """Return True once this rank has read this notice."""
        self.read()
        return text in self._texts

    def arrive(self, name: str) -> bool:
        """Count this rank, and return True on the last of all ranks: ranks count on their node, then nodes."""
        place = self._place
        if place.nodes == 1:
            return self._store.add(name, 1) == place.ranks_per_node
        return self._near.add(name, 1) == place.ranks_per_node and self._store.add(name, 1) == place.nodes

    def close(self) -> None:
        """Stop copying notices. Calling it again does nothing."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _node_store(self) -> dist.Store:
        """Return the store of this node, which its first rank opens on the loopback interface and keeps filled."""
        key = f"node_store/{environment.node_name()}"
        if self._place.local_rank:
            port = int(self._store.get(key))
            return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as free:
            port, listener = free.getsockname()[1], free.detach()
        near = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener)
        self._store.set(key, str(port))
        self._relay = _Relay(self._store, near, max(self._interval, self._place.nodes / _LOOKS_PER_SECOND))
        return near


class _Relay:
    """A thread that copies new notices from one store to another."""

    def __init__(self, source: dist.Store, target: dist.Store, interval: float) -> None:
        self._source, self._target, self._interval = source, target, interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        copied = 0
        while not self._closed.wait(self._interval):
            try:
                while (text := _find(self._source, copied + 1)) is not None:
                    copied += 1
                    self._target.set(f"{_COUNT}/{copied}", text)
            except RuntimeError:  # rank 0 is gone, and whoever watches the ranks ends this one
                return


def _find(store: dist.Store, number: int) -> str | None:
    """Return a notice, or None if it is not there: to wait for it would keep other threads from the store."""
    key = f"{_COUNT}/{number}"
    return store.get(key).decode() if store.check([key]) else None
