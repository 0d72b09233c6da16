"""The order in which a run's console hears of its trackers. Takes a second.

It would catch a tracker that is named behind the first step, and a run that waits for one that does not start.
"""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gspo_hpc.exchange.exchange import RolloutView
from gspo_hpc.trackers import feed
from gspo_hpc.trackers.protocol import Record, Sent, TrackedRun
from gspo_hpc.trackers.registry import Service
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.observers.console import ConsoleLines, TrackerWake
from gspo_hpc.training.telemetry.console import Console


class Late:
    """A tracker that starts once it may."""

    place, sent = "somewhere", Sent()

    def __init__(self, may_start: threading.Event) -> None:
        may_start.wait()

    def log(self, records: Sequence[Record]) -> None:
        """Take nothing."""

    def close(self, exit_code: int) -> None:
        """Do nothing."""


def feeds_of(folder: Path, may_start: threading.Event, tell: Callable[[str], None]) -> feed.Feeds:
    service = Service("late", lambda run, warn: Late(may_start))
    return feed.Feeds([service], TrackedRun(folder, "id", "name", {}), tell, tell)


@pytest.mark.parametrize(
    "begin",
    [
        lambda run: run.note("step 0: accuracy 0.5"),
        lambda run: run.step({"step": 1, "reward": 0.5}),
        lambda run: run.samples(0, "eval", RolloutView([], Counter({"no answer": 2}))),
    ],
    ids=["note", "step", "samples"],
)
def test_a_tracker_is_named_before_any_line_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Observers], None]
) -> None:
    """It is waited for no longer than until it is named."""
    monkeypatch.setattr(feed, "OPEN_SECONDS", 600.0)
    may_start, said = threading.Event(), io.StringIO()
    console = Console(said, 1, plain=True)
    feeds = feeds_of(tmp_path, may_start, console.note)
    threading.Timer(0.2, may_start.set).start()
    line = threading.Thread(target=begin, args=(Observers([TrackerWake(feeds), ConsoleLines(console)]),), daemon=True)
    line.start()
    line.join(60.0)
    assert not line.is_alive()
    feeds.close(0)
    first, *others = said.getvalue().splitlines()
    assert first == "tracker: somewhere" and others


@pytest.mark.parametrize("error", [None, RuntimeError("no key")], ids=["without", "fails"])
def test_a_tracker_that_will_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def opened(run: TrackedRun, warn: Callable[[str], None]) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(feed, "OPEN_SECONDS", 600.0)
    feeds = feed.Feeds([Service("none", opened)], TrackedRun(tmp_path, "id", "name", {}), lambda text: None)
    waiting = threading.Thread(target=feeds.wait_until_named, daemon=True)
    waiting.start()
    waiting.join(60.0)
    assert not waiting.is_alive()
    feeds.close(0)


def test_a_tracker_that_does_not_start_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, told = threading.Event(), list[str]()
    feeds = feeds_of(tmp_path, may_start, told.append)
    monkeypatch.setattr(feed, "OPEN_SECONDS", 0.1)
    feeds.wait_until_named()
    monkeypatch.setattr(feed, "OPEN_SECONDS", 600.0)
    later = threading.Thread(target=feeds.wait_until_named, daemon=True)
    later.start()
    later.join(60.0)
    assert not later.is_alive() and told == []
    may_start.set()
    feeds.close(0)
    assert told == ["tracker: somewhere"]
