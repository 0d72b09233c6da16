"""The part of ranks in the weight syncs that fill restarted engines, with a real store and stand-ins for engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from gspo_hpc.engine.engine import EngineDied
from gspo_hpc.rollout.notices import Notices
from gspo_hpc.rollout.recovery import EngineRecovery


class Restarted:
    """An engine that can always be started again."""

    def __init__(self) -> None:
        self.resubmitted = 0

    def restart(self) -> None:
        """Nothing is to be done here."""

    def resubmit(self) -> None:
        self.resubmitted += 1


def test_every_requested_sync_is_joined_once() -> None:
    """A rank that polls late finds two requests: each is a collective, which hangs without it."""
    store, here = dist.HashStore(), []
    engine: Any = Restarted()
    dying = EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None)
    other = EngineRecovery(None, Notices(store, interval=0.0), 1, 3, lambda fill: here.append(fill))
    assert other.join_syncs() is None and here == []
    dying.recover(EngineDied("gone"))
    dying.recover(EngineDied("gone again"))
    assert engine.resubmitted == 2
    assert other.join_syncs() is None and here == [None, None]
    assert other.join_syncs() is None and here == [None, None]


def test_of_several_syncs_the_first_fills_the_engine() -> None:
    store = dist.HashStore()
    engine: Any = Restarted()
    filled: list[Any] = []
    EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None).recover(EngineDied("gone"))
    EngineRecovery(engine, Notices(store, interval=0.0), 0, 3, lambda fill: None).recover(EngineDied("gone"))
    assert (
        EngineRecovery(engine, Notices(store, interval=0.0), 1, 3, lambda fill: filled.append(fill)).join_syncs(engine)
        is None
    )
    assert filled == [engine, None]


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
    # Three were requested by then, and the engine died of the first; it requested a fourth for the next start.
    assert filled == [engine, engine, None, None] and engine.resubmitted == 3


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
