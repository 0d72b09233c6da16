"""Observers that a config names in a user's file (`tracking.observers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.observers.process import ObserverProcess

PATIENCE, HURRY = 10.0, 2.0  # seconds for the last records: at the end of a run, and of an attempt that ends otherwise


class OwnObservers(StepObserver):
    """All observers of a user, each in a process of its own."""

    def __init__(self, names: Sequence[str], run_dir: Path, warn: Callable[[str], None]) -> None:
        self._processes = [ObserverProcess(name, run_dir, warn) for name in names]

    def step(self, record: dict[str, Any]) -> None:
        """Hand the record to every observer; none is waited for."""
        for one in self._processes:
            one.give(record)

    def close(self, patience: float) -> None:
        """Give the observers `patience` seconds in all for what is left, and end them."""
        for one in self._processes:
            one.close(patience / len(self._processes))
