"""Notices among ranks: one order for all, and few looks at the store of the job.

Catches ranks of which all poll the store of the job, a notice that is lost or read out of order, a count that several
ranks believe to have ended, ranks that wait for ever for notices that no longer reach their node, and a rank that only
waits and counts as one that moves on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gspo_hpc.rollout import node_store
from gspo_hpc.rollout.generation import CallCounters
from gspo_hpc.rollout.node_store import NoticesLost
from gspo_hpc.rollout.notices import NodeTopology, Notices
from gspo_hpc.system import progress


class Counted:
    """A store that counts who asks it how often."""

    def __init__(self, store: dist.Store) -> None:
        self.looks: list[str] = []
        self.fault: Callable[[], object] = bool  # called before each answer
        self._store = store

    def check(self, keys: list[str]) -> bool:
        self.looks.append(threading.current_thread().name)
        self.fault()
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def job(
    nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch, patience: float = 30.0
) -> tuple[Counted, list[Notices]]:
    """The notices of all ranks, with a store of its own on each node if there are several."""
    store: Any = Counted(dist.HashStore())
    ranks = []
    for node in range(nodes):
        monkeypatch.setattr(node_store.environment, "node_name", lambda node=node: f"node-{node}")
        for local in range(per_node):
            ranks.append(Notices(store, NodeTopology(local, per_node, nodes), 0.001, patience))
    return store, ranks


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 2)])
def test_all_ranks_read_the_same_in_the_same_order(nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = job(nodes, per_node, monkeypatch)
    threads = [
        threading.Thread(target=lambda i=i, r=r: [r.post("said", f"{i}/{n}") for n in range(5)])
        for i, r in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = 5 * len(ranks)
    until(lambda: all(rank.look(at_once=True) == total for rank in ranks))
    first = ranks[0].texts("said")
    assert len(set(first)) == total and all(rank.texts("said") == first for rank in ranks)
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
            rank.look(at_once=True)
    for rank in ranks:
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


def raised(rank: Notices) -> str:
    """The error that a rank gets sooner or later when it looks."""
    found: list[str] = []

    def look() -> bool:
        try:
            rank.look(at_once=True)
        except NoticesLost as error:
            found.append(str(error))
        return bool(found)

    until(look)
    return found[0]


def test_what_came_before_the_end_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sleeps between two looks finds the last notice and the end of the node's store together."""
    _, ranks = job(2, 2, monkeypatch)
    ranks[2].post("left")
    ranks[2].close()
    assert ranks[3].look(at_once=True) == 1 and "left" in ranks[3]._texts
    assert "has closed its store" in raised(ranks[3])
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("error", [RuntimeError("wait timeout after 5 s"), ValueError("odd")])
def test_every_rank_of_a_node_learns_that_its_notices_are_no_longer_copied(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They used to wait for ever, and counted as ranks that move on."""
    store, ranks = job(2, 3, monkeypatch)
    ranks[0].post("before")
    until(lambda: all(rank.has("before") for rank in ranks))

    def fail() -> None:
        raise error

    store.fault = fail
    for rank in ranks[3:]:
        assert f"node-1 cannot read notices from the store of the job any more: {type(error).__name__}: {error}" in (
            raised(rank)
        )
    with pytest.raises(NoticesLost):
        ranks[4].wait(1, lambda: False)
    with pytest.raises(NoticesLost):
        ranks[5].has("done")
    store.fault = bool
    for rank in ranks:
        rank.close()


def test_two_nodes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would count the other's ranks, and nobody would be the last."""
    store, _ = job(1, 1, monkeypatch)
    monkeypatch.setattr(node_store.environment, "node_name", lambda: "localhost")
    made = Notices(store, NodeTopology(0, 1, 2), 0.001)
    with pytest.raises(RuntimeError, match="two nodes of this job are called localhost"):
        Notices(store, NodeTopology(0, 1, 2), 0.001)
    made.close()


def test_a_store_that_does_not_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of rank 0 has lost its power: torch waits for its answer for ever."""
    answers = threading.Event()
    store, ranks = job(2, 2, monkeypatch, patience=0.05)
    store.fault = answers.wait
    for rank in ranks:
        assert "has not looked at the store of the job for 0 s" in raised(rank)
    answers.set()
    for rank in ranks:
        rank.close()


def test_the_time_for_which_a_rank_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scontrol suspend` stops relay and readers, and a reader may be the first to run again."""
    hours = [0.0]
    monotonic = time.monotonic
    monkeypatch.setattr(node_store.time, "monotonic", lambda: monotonic() + 3600 * hours[0])
    store, ranks = job(2, 2, monkeypatch)
    looks = threading.Event()
    looks.set()
    store.fault = looks.wait
    ranks[1].look(at_once=True)
    looks.clear()
    time.sleep(0.01)
    for _ in range(5):
        hours[0] += 1.0
        ranks[1].look(at_once=True)
    looks.set()
    for rank in ranks:
        rank.close()


def test_a_rank_that_waits_does_not_count_as_one_that_moves_on() -> None:
    """Else nobody would see that all wait for a notice that never comes."""
    store: Any = Counted(dist.HashStore())
    rank = Notices(store, interval=0.001)
    seen: list[tuple[int, str, str | None]] = []

    def observe() -> None:  # as the thread does that reports to the watcher
        until(lambda: progress.marks()[2] == progress.WAITS)
        seen.append(progress.marks())
        looks = len(store.looks)
        until(lambda: len(store.looks) > looks + 20)
        seen.append(progress.marks())
        Notices(store, interval=0.001).post("done")

    thread = threading.Thread(target=observe, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    rank.wait(rank.look(), lambda: time.monotonic() > end)
    thread.join(20)
    before, still = seen
    assert still == before and before[2] == progress.WAITS
    assert progress.marks()[0] > before[0] and progress.marks()[2] is None


def test_what_a_rank_keeps_and_reads_does_not_grow_with_the_calls() -> None:
    store: Any = Counted(dist.HashStore())
    rank = Notices(store, interval=0.0)
    sizes, looks = set(), set()
    for call in range(1, 100):
        counters = CallCounters(store, rank, call, 1)
        counters.add_finished(0)
        counters.stop()
        counters.leave()
        sizes.add(sum(map(len, rank._texts.values())))
        asked = len(store.looks)
        assert counters.over() and counters.all_left() and counters.stopped()
        assert not rank.has(f"generate/{call - 1}/done")
        looks.add(len(store.looks) - asked)
    assert sizes == {3} and looks == {4}
