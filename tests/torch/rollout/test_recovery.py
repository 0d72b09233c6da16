"""The part of ranks in the weight syncs that fill restarted engines, with a real store and stand-ins for engines."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gspo_hpc.engine.engine import EngineDied
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
    dying = EngineRecovery(engine, store, 0, 3, lambda fill: None)
    other = EngineRecovery(None, store, 1, 3, lambda fill: here.append(fill))
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
    EngineRecovery(engine, store, 0, 3, lambda fill: None).recover(EngineDied("gone"))
    EngineRecovery(engine, store, 0, 3, lambda fill: None).recover(EngineDied("gone"))
    assert EngineRecovery(engine, store, 1, 3, lambda fill: filled.append(fill)).join_syncs(engine) is None
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
        EngineRecovery(engine, store, 1, 3, lambda fill: None).recover(EngineDied("gone"))
    EngineRecovery(engine, store, 0, 3, sync_weights).recover(EngineDied("gone"))
    # Three were requested by then, and the engine died of the first; it requested a fourth for the next start.
    assert filled == [engine, engine, None, None] and engine.resubmitted == 3
