"""Weights for engines in the middle of a rollout: for one that died, and for all of them when newer ones come.

A restarted engine has no weights of use; the current ones come with a weight sync, which is collective. The
rank of the engine posts a notice, every other rank reads it at its next look, and all take part. They begin by agreeing
on how many engines wait: one sync fills all of them. If one of the ranks is to stop, they agree to leave.

In-flight updates come in the same way (rollout.in_flight_updates): the rank that hears of newer weights posts the
notice, and every engine stops, takes them, and continues what it was sampling.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.policy.passes import Abandoned, never
from gspo_hpc.rollout.notices import POLL_SECONDS, Notices
from gspo_hpc.system.progress import limited, waiting
from gspo_hpc.system.signals import signals_default_in_children

_DEATH, _RESYNC = "engine died", "resync"  # kinds of notices
_NEWER = "newer weights"  # the text of a resync that brings some


def engine_deaths(notices: Notices) -> Sequence[str]:
    """Return how engines died in this attempt, on any rank, as far as `notices` tell: one text each."""
    return notices.texts(_DEATH, at_once=True)


class InFlightWeights(Protocol):
    """Newer weights for engines that generate."""

    def have_come(self) -> bool:
        """Return True, once for each, if newer weights can be taken; on all ranks but one it is always False."""
        ...

    def take(self) -> int:
        """Give them to the engines, which wait; return the number of steps that made them. Collective.

        Raises Abandoned, on all ranks, if one of them is to stop.
        """
        ...


class EngineLost(RuntimeError):
    """An engine died more often than faults.max_engine_restarts allows."""


class EngineRecovery:
    """Restarts of this rank's engine, and this rank's part in the weight syncs that fill restarted engines."""

    def __init__(
        self,
        engine: Engine | None,
        notices: Notices,
        rank: int,
        max_restarts: int,
        sync_weights: Callable[[Engine | None], EngineDied | None],
        *,
        stop_requested: Callable[[], bool] = never,
        agree: Callable[[Sequence[float]], list[float]] = list,
        shares_memory: bool = False,
        sleep_level: int = 2,
        in_flight: InFlightWeights | None = None,
    ) -> None:
        """Take `sync_weights`, which every rank calls together.

        It fills and checks an engine, or only takes part if it gets None, and returns how the engine died, if it did.
        `agree` returns the largest of each number over all ranks, which call it together; by default there is one rank.
        `shares_memory`: the trainer's weights take the GPU's memory in a sync, so other engines must leave it. They
        sleep at `sleep_level`; at 2 they are filled, too. `in_flight`: where newer weights come from in a rollout.
        """
        self._engine, self._notices, self._rank, self._max_restarts = engine, notices, rank, max_restarts
        self._sync_weights, self._stop_requested, self._agree = sync_weights, stop_requested, agree
        self._shares_memory, self._sleep_level = shares_memory, sleep_level
        self._in_flight = in_flight
        self.weights_version = 0  # the number of steps that had made the weights of all engines, as far as it is known
        self._restarts = 0  # of this rank's engines
        self._served = 0  # requests for a sync

    def restart(self, death: EngineDied, engine: Engine | None = None) -> bool:
        """Restart this rank's engine, to which the caller gives the current weights, or another `engine` of this rank.

        Return False, with an engine that is not to be used, if a stop is requested: there is no time for it. Raises
        EngineLost if that is one restart too many, of all engines of this rank.
        """
        engine = engine or self._engine
        assert engine is not None
        reason: Exception = death
        limit = self._max_restarts
        while not self._stop_requested():
            self._restarts += 1
            if self._restarts > limit:
                times = f"{self._restarts} times (faults.max_engine_restarts {limit})"
                raise EngineLost(f"the engine of rank {self._rank} died {times}: {reason}") from reason
            print(f"engine died ({reason}); restart {self._restarts} of at most {limit}", flush=True)
            self._notices.post(_DEATH, f"rank {self._rank}: {reason}")
            try:
                with signals_default_in_children(), limited():  # START_SECONDS ends it
                    engine.restart()
                return not self._stop_requested()
            except RuntimeError as error:
                reason = error
        return False

    def recover(self, death: EngineDied) -> None:
        """Restart this rank's engine, have all ranks fill it, and give it its unfinished groups again.

        If a stop is requested meanwhile, the engine is left as it is, and the caller gives up the groups. Raises
        Abandoned as :meth:`join_syncs` does.
        """
        assert self._engine is not None
        lost: EngineDied | None = death
        while lost is not None:
            if not self.restart(lost):
                return
            self._notices.post(_RESYNC)
            lost = self.join_syncs(self._engine)
        self._engine.resubmit()

    def note_weights(self, version: int | None) -> None:
        """Note that engines have weights that so many steps had made; None: that is not known."""
        self.weights_version = max(self.weights_version, version or 0)

    def or_weights(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that is True if `interrupted` is, or if newer weights have come."""
        return lambda: interrupted() or self._announce()

    def _announce(self) -> bool:
        """Tell all ranks, once, of newer weights; return True if there are some."""
        if self._in_flight is None or not self._in_flight.have_come():
            return False
        self._notices.post(_RESYNC, _NEWER)
        return True

    def _texts(self, count: int) -> Sequence[str]:
        """Return the texts of the first `count` requests for a sync, which are all posted."""
        while len(found := self._notices.texts(_RESYNC, at_once=True)) < count:
            time.sleep(POLL_SECONDS)
        return found[:count]

    def join_syncs(self, fill: Engine | None = None, *, leaving: bool = False) -> EngineDied | None:
        """Take part in a weight sync if one was requested, and return how `fill` died, if it did.

        It fills `fill`, and the engines of all ranks that requested one by now. An engine of this rank that has its
        weights leaves the GPU's memory meanwhile, if the trainer needs that, and samples its unfinished groups again:
        the same completions, for their seeds are. Raises Abandoned, on all ranks, if one of them is to stop.

        `leaving`: this rank has nothing more to do in the call, so it asks nobody to take newer weights.
        """
        if not leaving:
            self._announce()
        while self._served < (requested := len(self._notices.texts(_RESYNC))):
            with waiting():  # for ranks whose engines are started again
                most, stops = self._agree([requested, self._stop_requested()])
                texts = self._texts(int(most))[self._served :]
            # A rank requests before it comes here, so nobody is left that asked for more than the most of all ranks.
            self._served = int(most)
            if stops:
                raise Abandoned
            if _NEWER in texts:
                self._take_newer()
                fill = None  # it is filled with the others
                continue
            suspended = self._engine if self._shares_memory and fill is None else None
            if suspended is not None:
                suspended.suspend(self._sleep_level)
                fill = suspended if self._sleep_level == 2 else None
            death = self._sync_weights(fill)
            if suspended is not None:
                with contextlib.suppress(EngineDied):  # the next step of generation finds it dead
                    suspended.wake_up()
                suspended.resubmit()
            if death is not None:
                return death
            fill = None
        return None

    def _take_newer(self) -> None:
        assert self._in_flight is not None
        if self._engine is not None:
            self._engine.hold(self.weights_version)
        self.note_weights(self._in_flight.take())
        if self._engine is not None:
            self._engine.resubmit()

    def deaths(self) -> Sequence[str]:
        """Return how engines died in this attempt, on any rank: one text each."""
        return self._notices.texts(_DEATH, at_once=self._rank == 0)  # which writes them down
