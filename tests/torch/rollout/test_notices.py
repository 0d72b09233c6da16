"""Notices among ranks: one order for all, and few looks at the store of the job.

Catches ranks of which all poll the store of the job, a notice that is lost or read out of order, and a count that
several ranks believe to have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from gspo_hpc.rollout import notices
from gspo_hpc.rollout.notices import NodeRank, Notices

T = TypeVar("T")


class Counted:
    """A store that counts who asks it how often."""

    def __init__(self, store: dist.Store) -> None:
        self.looks: list[str] = []
        self._store = store

    def check(self, keys: list[str]) -> bool:
        self.looks.append(threading.current_thread().name)
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def job(nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counted, list[Notices]]:
    """The notices of all ranks, with a store of its own on each node if there are several."""
    store: Any = Counted(dist.HashStore())
    ranks = []
    for node in range(nodes):
        monkeypatch.setattr(notices.environment, "node_name", lambda node=node: f"node-{node}")
        for local in range(per_node):
            ranks.append(Notices(store, NodeRank(local, per_node, nodes), interval=0.001))
    return store, ranks


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 2)])
def test_all_ranks_read_the_same_in_the_same_order(nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = job(nodes, per_node, monkeypatch)
    threads = [
        threading.Thread(target=lambda i=i, r=r: [r.post(f"{i}/{n}") for n in range(5)]) for i, r in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = 5 * len(ranks)
    until(lambda: all(len(rank.read(at_once=True)) == total for rank in ranks))
    first = ranks[0].read()
    assert len(set(first)) == total and all(rank.read() == first for rank in ranks)
    assert [text for text in first if text.startswith("1/")] == [f"1/{n}" for n in range(5)]
    for rank in ranks:
        rank.close()


def test_only_one_thread_of_a_node_asks_the_store_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its ranks look."""
    store, ranks = job(2, 4, monkeypatch)
    ranks[5].post("done")
    until(lambda: all(rank.has("done") for rank in ranks))
    for rank in ranks:
        for _ in range(100):
            rank.read(at_once=True)
        rank.close()
    assert set(store.looks) == {"notices"}  # the threads that copy


def test_a_rank_does_not_ask_again_within_the_interval() -> None:
    store: Any = Counted(dist.HashStore())
    rank = Notices(store, interval=60.0)
    for _ in range(100):
        assert not rank.has("done")
    assert len(store.looks) == 1


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 3)])
def test_one_rank_is_the_last_of_all(nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = job(nodes, per_node, monkeypatch)
    assert [rank.arrive("left") for rank in ranks] == [False] * (len(ranks) - 1) + [True]
    assert [rank.arrive("left again") for rank in reversed(ranks)] == [False] * (len(ranks) - 1) + [True]
    for rank in ranks:
        rank.close()
