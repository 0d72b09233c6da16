"""The order in which a run's console hears of its trackers. Takes a second.

It would catch a tracker that is named behind the first step, and a run that waits for one that does not start.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_hpc.trackers import feed
from gspo_hpc.trackers.protocol import Record, Sent, TrackedRun
from gspo_hpc.trackers.registry import Service


class Late:
    """A tracker that starts once it may."""

    place, sent = "somewhere", Sent()

    def __init__(self, may_start: threading.Event) -> None:
        may_start.wait()

    def log(self, records: Sequence[Record]) -> None:
        """Take nothing."""

    def close(self, exit_code: int) -> None:
        """Do nothing."""


def feeds_of(folder: Path, may_start: threading.Event, told: list[str]) -> feed.Feeds:
    service = Service("late", lambda run, warn: Late(may_start))
    return feed.Feeds([service], TrackedRun(folder, "id", "name", {}), told.append, told.append)


def test_a_tracker_is_named_before_the_first_step(tmp_path: Path) -> None:
    may_start, told = threading.Event(), list[str]()
    feeds = feeds_of(tmp_path, may_start, told)
    threading.Timer(0.2, may_start.set).start()
    feeds.wake()
    told.append("step 0")
    feeds.close(0)
    assert told == ["tracker: somewhere", "step 0"]


def test_a_tracker_that_does_not_start_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, told = threading.Event(), list[str]()
    feeds = feeds_of(tmp_path, may_start, told)
    monkeypatch.setattr(feed, "OPEN_SECONDS", 0.1)
    feeds.wake()
    monkeypatch.setattr(feed, "OPEN_SECONDS", 600.0)
    later = threading.Thread(target=feeds.wake, daemon=True)
    later.start()
    later.join(60.0)
    assert not later.is_alive() and told == []
    may_start.set()
    feeds.close(0)
    assert told == ["tracker: somewhere"]
