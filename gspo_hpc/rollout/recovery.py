"""Recovery of engines that died in a rollout.

A restarted engine has no weights of use; the current ones come with a weight sync, which is collective. The
rank of the engine posts a notice, every other rank reads it at its next look, and all take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.rollout.notices import Notices
from gspo_hpc.system.progress import limited
from gspo_hpc.system.signals import signals_default_in_children

_DEATH, _RESYNC = "engine died: ", "resync"  # notices


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
        shares_memory: bool = False,
        sleep_level: int = 2,
    ) -> None:
        """Take `sync_weights`, which every rank calls together.

        It fills and checks an engine, or only takes part if it gets None, and returns how the engine died, if it did.
        `shares_memory`: the trainer's weights take the GPU's memory in a sync, so other engines must leave it. They
        sleep at `sleep_level`; at 2 they are filled, too.
        """
        self._engine, self._notices, self._rank, self._max_restarts = engine, notices, rank, max_restarts
        self._sync_weights = sync_weights
        self._shares_memory, self._sleep_level = shares_memory, sleep_level
        self._restarts = 0  # of this rank's engine
        self._syncs_seen = 0

    def restart(self, death: EngineDied) -> None:
        """Restart this rank's engine, to which the caller gives the current weights.

        Raises EngineLost if that is one restart too many.
        """
        assert self._engine is not None
        reason: Exception = death
        limit = self._max_restarts
        while True:
            self._restarts += 1
            if self._restarts > limit:
                times = f"{self._restarts} times (faults.max_engine_restarts {limit})"
                raise EngineLost(f"the engine of rank {self._rank} died {times}: {reason}") from reason
            print(f"engine died ({reason}); restart {self._restarts} of at most {limit}", flush=True)
            self._notices.post(f"{_DEATH}rank {self._rank}: {reason}")
            try:
                with signals_default_in_children(), limited():  # START_SECONDS ends it
                    self._engine.restart()
                return
            except RuntimeError as error:
                reason = error

    def recover(self, death: EngineDied) -> None:
        """Restart this rank's engine, have all ranks fill it, and give it its unfinished groups again."""
        assert self._engine is not None
        lost: EngineDied | None = death
        while lost is not None:
            self.restart(lost)
            self._notices.post(_RESYNC)
            lost = self.join_syncs(self._engine)
        self._engine.resubmit()

    def join_syncs(self, fill: Engine | None = None) -> EngineDied | None:
        """Take part in every weight sync that was requested, and return how `fill` died, if it did.

        The first sync fills `fill` too. An engine of this rank that has its weights leaves the GPU's memory meanwhile,
        if the trainer needs that, and samples its unfinished groups again: the same completions, for their seeds are.
        """
        requested = self._notices.read().count(_RESYNC)
        while self._syncs_seen < requested:
            self._syncs_seen += 1
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

    def deaths(self) -> list[str]:
        """Return how engines died in this attempt, on any rank: one text each."""
        notices = self._notices.read(at_once=self._rank == 0)  # which writes them down
        return [text.removeprefix(_DEATH) for text in notices if text.startswith(_DEATH)]
