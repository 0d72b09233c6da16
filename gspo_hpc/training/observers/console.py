"""Observers that show a run to the person who watches it: the console, its progress bar, and the trackers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_hpc.exchange.exchange import RolloutView
from gspo_hpc.rollout.generation import ProgressCallback
from gspo_hpc.trackers.feed import Feeds
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.telemetry.console import Console

_FAILURES = 3  # different ones on the console in a rollout


class ConsoleLines(StepObserver):
    """The rows and remarks on the console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, record: dict[str, Any]) -> None:
        """Show one row."""
        self._console.step(record)

    def samples(self, step: int, phase: str, shown: RolloutView) -> None:
        """Show why reward functions failed, if any did."""
        for failure, count in shown.failures.most_common(_FAILURES):
            self._console.note(f"a reward function failed for {count} completion{'s' if count != 1 else ''}: {failure}")

    def note(self, text: str) -> None:
        """Show one line."""
        self._console.note(text)

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Show the table, and where the traces are."""
        for line in (*table.splitlines(), f"open the traces with ui.perfetto.dev: {traces}"):
            self._console.note(line)


class ProgressBar(StepObserver):
    """The progress of a rollout on the console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def rollout(self, number: int, completions: int) -> Iterator[ProgressCallback]:
        """Show a bar within the block, and yield the function that moves it."""
        with self._console.rollout(number, completions) as bar:
            seen = 0

            def progress(finished: int, tokens: int) -> None:
                nonlocal seen
                bar.advance(finished, tokens - seen)
                seen = tokens

            yield progress


class TrackerWake(StepObserver):
    """The call to the trackers, which read the record from metrics.jsonl: it comes after the writer of that file.

    It comes before the lines of the console, so that trackers are named before the first step.
    """

    def __init__(self, trackers: Feeds) -> None:
        self._trackers = trackers

    def step(self, record: dict[str, Any]) -> None:
        """Tell the trackers that there is a record."""
        self._trackers.wait_until_named()
        self._trackers.wake()

    def samples(self, step: int, phase: str, shown: RolloutView) -> None:
        """Have the trackers named before the lines on reward functions that failed."""
        self._trackers.wait_until_named()

    def note(self, text: str) -> None:
        """Have the trackers named before the line."""
        self._trackers.wait_until_named()
