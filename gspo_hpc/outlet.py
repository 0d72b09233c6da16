"""What rank 0 does with results: files of the run directory, console, trackers, checkpoints that count.

Floor 4. The other ranks have :class:`Silent`.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc import commit, journal
from gspo_hpc.commit import Entry
from gspo_hpc.config import Config
from gspo_hpc.console import Console
from gspo_hpc.cursor import Cursor
from gspo_hpc.records import Group
from gspo_hpc.rollout import Station
from gspo_hpc.rundir import RunDir, write_atomically
from gspo_hpc.tracking import Tracker

CURSOR, ROLLOUT, RECORD = "cursor.json", "rollout.jsonl", "record.json"  # files of a checkpoint


class Silent:
    """Ranks other than 0 say nothing."""

    def rollout(self, number: int, completions: int) -> contextlib.AbstractContextManager[Any]:
        """Nothing."""
        return contextlib.nullcontext()

    def step(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def samples(self, step: int, phase: str, groups: Sequence[Group]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Nothing."""

    def committed(
        self,
        staging: Path,
        known: Mapping[str, Entry],
        cursor: Cursor,
        groups: Sequence[Group],
        record: dict[str, Any] | None,
    ) -> None:
        """Nothing."""


_FAILURES = 3  # different ones on the console in a rollout


class Files:
    """Rank 0: metrics.jsonl, samples.jsonl, console, trackers, commits."""

    def __init__(self, run: RunDir, console: Console, tracker: Tracker, station: Station, config: Config):
        self.run = run
        self.console = console
        self.tracker = tracker
        self.station = station
        self.kept_samples = config.tracking.samples
        self.keep = config.checkpoint.keep
        self.layout = config.layout

    @contextlib.contextmanager
    def rollout(self, number: int, completions: int) -> Iterator[None]:
        """A progress bar that the station's progress moves."""
        with self.console.rollout(number, completions) as bar:
            seen = 0

            def progress(finished: int, tokens: int) -> None:
                nonlocal seen
                bar.advance(finished, tokens - seen)
                seen = tokens

            self.station.on_progress = progress
            try:
                yield
            finally:
                self.station.on_progress = lambda finished, tokens: None

    def step(self, record: dict[str, Any]) -> None:
        """metrics.jsonl first: it is the truth; the console and the trackers follow."""
        self.run.append_metrics(record)
        self.tracker.log(record)
        self.console.step(record)

    def samples(self, step: int, phase: str, groups: Sequence[Group]) -> None:
        """The first few greedy completions of an evaluation, or one completion each of a rollout's first groups; why
        graders failed, if any did."""
        rows = [
            {
                "step": step,
                "phase": phase,
                "prompt": group.prompt.text,
                "completion": group.completions[0].text,
                "reward": group.completions[0].reward,
                "failure": group.completions[0].failure,
                "answer": group.prompt.fields,
            }
            for group in groups[: self.kept_samples]
        ]
        self.run.append_samples(rows)
        self.tracker.log_samples(rows)
        failures = Counter(c.failure for group in groups for c in group.completions if c.failure is not None)
        for failure, count in failures.most_common(_FAILURES):
            self.console.note(f"grading failed for {count} completion{'s' if count != 1 else ''}: {failure}")

    def note(self, text: str) -> None:
        """One line on the console."""
        self.console.note(text)

    def profile(self, step: int, table: str, traces: Path) -> None:
        """The table beside the traces, and on the console."""
        write_atomically(traces / f"step-{step:06d}.txt", table + "\n")
        for line in (*table.splitlines(), f"traces for ui.perfetto.dev: {traces}"):
            self.console.note(line)

    def committed(
        self,
        staging: Path,
        known: Mapping[str, Entry],
        cursor: Cursor,
        groups: Sequence[Group],
        record: dict[str, Any] | None,
    ) -> None:
        """Add the cursor and the rollout in use, commit, then drop what is no longer needed."""
        write_atomically(staging / CURSOR, json.dumps(cursor.to_dict(), indent=1))
        write_atomically(staging / ROLLOUT, "".join(group.to_json() + "\n" for group in groups))
        write_atomically(staging / RECORD, json.dumps(record))
        commit.commit(staging, cursor.step, {"layout": self.layout}, known)
        commit.retain(self.run.checkpoints, self.keep)
        journal.retire(self.run.rollouts, cursor.rollout)


def read_start(checkpoint: Path) -> tuple[Cursor, list[Group], dict[str, Any] | None]:
    """Cursor, groups in use and unlogged record of a committed checkpoint."""
    cursor = Cursor.from_dict(json.loads((checkpoint / CURSOR).read_text("utf-8")))
    lines = (checkpoint / ROLLOUT).read_text("utf-8").splitlines()
    record = json.loads((checkpoint / RECORD).read_text("utf-8"))
    return cursor, [Group.from_json(line) for line in lines], record
