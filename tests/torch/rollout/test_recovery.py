"""The part of ranks in the weight syncs that fill restarted engines, with a real store and stand-ins for engines.

Catches a rank that misses a sync or comes to one of its own, a sync for each of several engines that one could fill,
and a stop that does not reach all ranks of a sync.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gspo_hpc.engine.engine import EngineDied
from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.rollout.generation import CallCounters
from gspo_hpc.rollout.notices import NodeTopology, Notices
from gspo_hpc.rollout.recovery import EngineLost, EngineRecovery
from gspo_hpc.rollout.worker import RolloutWorker
from tests.torch.ledger.world import World


class Restarted:
    """An engine that can always be started again."""

    def __init__(self) -> None:
        self.resubmitted = 0

    def restart(self) -> None:
        """Nothing is to be done here."""

    def resubmit(self) -> None:
        self.resubmitted += 1


def test_every_request_is_served_once() -> None:
    """A rank that looks late finds two requests, and one sync fills both engines."""
    store, here = dist.HashStore(), []
    engine: Any = Restarted()
    dying = EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None)
    other = EngineRecovery(None, Notices(store, interval=0.0), 1, 3, lambda fill: here.append(fill))
    assert other.join_syncs() is None and here == []
    dying.recover(EngineDied("gone"))
    dying.recover(EngineDied("gone again"))
    assert engine.resubmitted == 2
    assert other.join_syncs() is None and here == [None]
    assert other.join_syncs() is None and here == [None]
    dying.recover(EngineDied("gone once more"))
    assert other.join_syncs() is None and here == [None, None]


def test_a_sync_that_others_requested_fills_the_engine() -> None:
    store = dist.HashStore()
    engine: Any = Restarted()
    filled: list[Any] = []
    EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None).recover(EngineDied("gone"))
    EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None).recover(EngineDied("gone"))
    assert (
        EngineRecovery(engine, Notices(store, interval=0.0), 1, 3, lambda fill: filled.append(fill)).join_syncs(engine)
        is None
    )
    assert filled == [engine]


def test_a_sync_that_kills_the_engine_leaves_the_others_to_be_joined() -> None:
    store = dist.HashStore()
    engine: Any = Restarted()
    deaths = iter([EngineDied("of the sync"), None, None, None])
    filled: list[Any] = []

    def sync_weights(fill: Any) -> EngineDied | None:
        filled.append(fill)
        return next(deaths)

    for _ in range(2):
        EngineRecovery(engine, Notices(store, interval=0.0), 1, 3, lambda fill: None).recover(EngineDied("gone"))
    EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, sync_weights).recover(EngineDied("gone"))
    # Three were requested by then, and the engine died of the sync; it requested a fourth for the next start.
    assert filled == [engine, engine] and engine.resubmitted == 3


def ranks_of(world: World, work: Callable[[EngineRecovery], object], stops: Callable[[], bool]) -> list[list[Any]]:
    """Run `work` on ranks that have an engine each; return what every rank's syncs filled."""
    store = dist.HashStore()
    filled: list[list[Any]] = [[] for _ in range(world.size)]

    def sync_weights(fill: Any) -> None:
        filled[world.rank].append(fill)
        world.wait()

    def rank() -> None:
        engine: Any = Restarted()
        agree = lambda values: [max(column) for column in zip(*world.gather(values), strict=True)]  # noqa: E731
        notices = Notices(store, interval=0.0)
        work(EngineRecovery(engine, notices, world.rank, 3, sync_weights, stop_requested=stops, agree=agree))

    world.run(rank)
    return filled


@pytest.mark.parametrize("seed", range(5))
def test_engines_that_die_at_about_the_same_time_cost_one_sync(seed: int) -> None:
    """Each used to cost one, of which all but the first filled nobody."""
    world = World(4, seed, delay=0.02)
    all_dead = threading.Barrier(3)

    def work(recovery: EngineRecovery) -> None:
        if world.rank < 3:
            all_dead.wait(20)
            world.dawdle()
            recovery.recover(EngineDied("gone"))
            assert recovery._engine is not None and recovery._engine.resubmitted == 1  # type: ignore[attr-defined]
        else:
            while not recovery._served:
                recovery.join_syncs()

    filled = ranks_of(world, work, lambda: False)
    assert [[engine is not None for engine in of_rank] for of_rank in filled] == [[True], [True], [True], [False]]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_on_one_rank_keeps_all_from_a_sync(stopped: int) -> None:
    """Whether it reaches the rank whose engine died, or another, after the request."""
    world = World(2, 1)
    requested = threading.Event()

    def work(recovery: EngineRecovery) -> None:
        with pytest.raises(Abandoned):
            if world.rank:
                while not recovery._notices.has("resync"):
                    world.dawdle()
                requested.set()
                recovery.join_syncs()
            else:
                recovery._notices.post("resync")
                requested.wait(20)
                recovery.join_syncs(recovery._engine)

    assert ranks_of(world, work, lambda: requested.is_set() and world.rank == stopped) == [[], []]


class Unstartable(Restarted):
    """An engine whose start the signal ends that stops the job."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = 0

    def restart(self) -> None:
        self.starts += 1
        raise RuntimeError("vLLM did not start: terminated")


def test_no_engine_is_started_once_a_stop_is_requested() -> None:
    """It would cost the time that is left for the save, and its failure the attempt."""
    engine: Any = Unstartable()
    notices = Notices(dist.HashStore(), interval=0.0)
    recovery = EngineRecovery(engine, notices, 0, 1, lambda fill: None, stop_requested=lambda: engine.starts > 0)
    recovery.recover(EngineDied("gone"))
    assert engine.starts == 1 and engine.resubmitted == 0 and not notices.has("resync")
    recovery.recover(EngineDied("gone"))
    assert engine.starts == 1 and len(recovery.deaths()) == 1
    never_stopped = EngineRecovery(engine, notices, 0, 1, lambda fill: None)
    with pytest.raises(EngineLost):
        never_stopped.recover(EngineDied("gone"))


class Suspended(Restarted):
    """An engine that generates while another one is filled; it notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def suspend(self, level: int) -> None:
        self.calls.append(f"sleep at level {level}")

    def wake_up(self) -> None:
        self.calls.append("wake up")

    def resubmit(self) -> None:
        self.calls.append("resubmit")


@pytest.mark.parametrize("death", [None, EngineDied("of the sync")])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_leaves_the_memory_is_filled_if_it_drops_its_weights(level: int, death: Any) -> None:
    """A level of its own would take host memory that the plan does not know; and no group is lost if it dies."""
    store, engine, filled = dist.HashStore(), Suspended(), []

    def sync_weights(fill: Any) -> EngineDied | None:
        filled.append(fill)
        return death if fill is not None else None

    dying: Any = Restarted()
    EngineRecovery(dying, Notices(store, interval=0.0), 0, 3, lambda fill: None).recover(EngineDied("gone"))
    owned: Any = engine
    notices = Notices(store, interval=0.0)
    other = EngineRecovery(owned, notices, 1, 3, sync_weights, shares_memory=True, sleep_level=level)
    assert other.join_syncs() is (death if level == 2 else None)
    assert filled == [engine if level == 2 else None]
    assert engine.calls == [f"sleep at level {level}", "wake up", "resubmit"]


class Held(Restarted):
    """An engine that notes the weights under which it was held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    def hold(self, weights_version: int) -> None:
        self.held.append(weights_version)


class Newer:
    """Newer weights of a rank in a world: those of steps 4 and 6, of which rank 0 hears."""

    def __init__(self, world: World) -> None:
        self._world, self._coming, self._announced, self.taken = world, [4, 6], False, list[int]()

    def have_come(self) -> bool:
        told, self._announced = self._announced, True
        return not told and self._world.rank == 0 and bool(self._coming)

    def take(self) -> int:
        self._world.wait()
        self._announced = False
        self.taken.append(self._coming.pop(0))
        return self.taken[-1]


@pytest.mark.parametrize("seed", range(5))
def test_newer_weights_reach_every_engine_also_one_that_dies_meanwhile(seed: int) -> None:
    """In-flight updates: all ranks take part once for each, and engines are told under which weights they were held."""
    world, store = World(4, seed, delay=0.02), dist.HashStore()
    engines: list[Any] = [Held(), Held(), Held(), None]
    newer = [Newer(world) for _ in engines]
    refilled: list[list[Any]] = [[] for _ in engines]

    def sync_weights(fill: Any) -> None:
        refilled[world.rank].append(fill)
        world.wait()

    def rank() -> None:
        number = world.rank
        agree = lambda values: [max(column) for column in zip(*world.gather(values), strict=True)]  # noqa: E731
        notices = Notices(store, interval=0.0)
        recovery = EngineRecovery(
            engines[number], notices, number, 3, sync_weights, agree=agree, in_flight=newer[number]
        )
        recovery.note_weights(2)
        world.dawdle()
        if number == 1:
            recovery.recover(EngineDied("gone"))
        while recovery.weights_version < 6:
            recovery.join_syncs()
        world.wait()
        assert not recovery._announce() and recovery.join_syncs(leaving=True) is None

    world.run(rank)
    assert [one.taken for one in newer] == [[4, 6]] * 4
    assert [engine.held for engine in engines[:3]] == [[2, 4]] * 3
    assert engines[1].resubmitted == 3 and engines[0].resubmitted == engines[2].resubmitted == 2
    # Alone, the death costs a sync of its own; together with newer weights it costs none.
    assert all(len(fills) == len(refilled[0]) <= 1 for fills in refilled)


def test_a_rank_that_leaves_asks_nobody_to_take_weights() -> None:
    """Ranks that left before it could be gone: the command is carried out after the call."""
    world, notices = World(1, 0), Notices(dist.HashStore(), interval=0.0)
    newer: Any = Newer(world)
    recovery = EngineRecovery(None, notices, 0, 3, lambda fill: None, in_flight=newer)
    assert recovery.join_syncs(leaving=True) is None and not notices.has("resync")
    assert not newer._announced


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_weights_that_were_announced_at_the_end_of_a_call_are_taken_by_all_ranks_or_by_none(leaves_first: int) -> None:
    """The first rank announces them while it waits, and reads at the same time that the call is over.

    The rank that left last used to end the call at once, while the other one waited for it in the sync.
    """
    world, store = World(2, 0), dist.HashStore()
    newer = [Newer(world) for _ in range(world.size)]
    engines: list[Any] = [Held(), Held()]
    left = threading.Event()

    def rank() -> None:
        number = world.rank
        agree = lambda values: [max(column) for column in zip(*world.gather(values), strict=True)]  # noqa: E731
        notices = Notices(store, NodeTopology(ranks_per_node=world.size), interval=0.0)
        recovery = EngineRecovery(
            engines[number], notices, number, 3, lambda fill: None, agree=agree, in_flight=newer[number]
        )
        unused: Any = None
        worker = RolloutWorker(unused, unused, store, notices, engines[number], None, 2, recovery, lambda: False)
        counters = CallCounters(store, notices, 1, 1)
        if number == 0:
            assert recovery.or_weights(lambda: False)()
        world.wait()
        if number == 1:
            counters.add_finished(0)
        world.wait()
        if number != leaves_first:
            left.wait(1.0)  # long enough for the other one to be there
        worker._leave(counters)
        left.set()
        assert counters.over()

    world.run(rank)
    assert [one.taken for one in newer] == [[4], [4]]
    assert [engine.resubmitted for engine in engines] == [1, 1]
