"""Checkpoints of an attempt, as the loop asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.policy.process_groups import Ranks, any_rank, broadcast_bytes
from gspo_hpc.runs import commit
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.control import Client
from gspo_hpc.system.progress import waiting
from gspo_hpc.training.checkpoint_state import CheckpointState
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.telemetry.step_clock import StepClock

_PATIENCE = 5.0  # seconds that a failing rank waits for a save under way: those who watch it end it soon
_SAVE_MARGIN = 1.5  # seconds that a save may need, per second of the one before it


class Checkpoints:
    """Saves of one attempt. All ranks make one, and call :meth:`save` and :meth:`can_save` together."""

    def __init__(
        self,
        saver: Saver,
        new_staging: Callable[[int], Path],  # the folder to write a step's checkpoint into, the same on every rank
        control: Client | None,  # to the process that watches this rank
        observers: StepObserver,
        clock: StepClock,
        ranks: Ranks,
    ) -> None:
        self._saver, self._new_staging, self._control = saver, new_staging, control
        self._observers, self._clock, self._ranks = observers, clock, ranks

    def save(self, state: CheckpointState) -> None:
        """Begin a checkpoint of what the run's steps have led to; training goes on while it is written."""
        with self._clock.phase("save"):
            self.wait()
            staging = self._new_staging(state.cursor.step)
            self._saver.save(
                staging,
                lambda known: self._observers.checkpoint(staging, known, state),
                lambda: state.write_groups(staging, self._ranks.rank),
            )

    def can_save(self) -> bool:
        """Return True if a checkpoint begun now would be whole before this job is killed, as far as rank 0 knows."""
        control = self._control
        left = None if control is None or control.deadline is None else control.deadline - time.time()
        too_late = left is not None and control is not None and left < control.save_seconds * _SAVE_MARGIN
        if any_rank(too_late, self._ranks.device):
            self._observers.note("no time is left for a checkpoint; the next start resumes from the previous one")
            return False
        return True

    def check(self) -> None:
        """Raise what a save failed with that is over by now."""
        self._saver.check()

    def wait(self) -> None:
        """Wait until no save is under way; raise what it failed with."""
        self._saver.wait()
        if self._control is not None:
            self._control.save_seconds = self._saver.seconds

    def wait_briefly(self) -> None:
        """Wait for a save under way, but not for long; raise what it failed with, or TimeoutError."""
        self._saver.wait(_PATIENCE)


def new_staging(run: RunDir, ranks: Ranks, step: int) -> Path:
    """Return a new folder for the checkpoint of a step, the same on every rank. Collective."""
    path = str(commit.begin(run.checkpoints, step)) if ranks.rank == 0 else ""
    with waiting():  # for rank 0, whose save before may not be on the disk yet
        return Path(broadcast_bytes(path.encode(), ranks.device).decode())
