"""Feed trackers with the records of a run while it trains, each in a thread of its own.

A tracker that is down, slow or broken costs the run nothing: its thread reads metrics.jsonl at its own pace, so nothing
is queued for it and nothing is lost. One that fails gets one warning, and no more records in this attempt; the next
attempt, or `gspo-hpc sync`, sends what it lacks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.terminal import pasteable
from gspo_hpc.trackers.protocol import TrackedRun, Tracker, in_one_line
from gspo_hpc.trackers.reader import MetricsReader
from gspo_hpc.trackers.registry import Service

OPEN_SECONDS = 5.0  # what all trackers together may cost at the start, so that they are named before the first step
CLOSE_SECONDS = 60.0  # what they may cost at the end
_POLL = 5.0  # seconds after which a thread looks for records that nobody told it of

Say = Callable[[str], None]


def _warn(text: str) -> None:
    print(f"warning: {pasteable(text)}", file=sys.stderr)


def _one_at_a_time(*functions: Say) -> tuple[Say, ...]:
    """Return the functions so that threads which call them wait for each other."""
    lock = threading.Lock()

    def guarded(function: Say) -> Say:
        def call(text: str) -> None:
            with lock:
                function(text)

        return call

    return tuple(guarded(function) for function in functions)


class Feeds:
    """The trackers of a run, on the one rank that has them."""

    def __init__(
        self, services: Sequence[Service], run: TrackedRun, warn: Say = _warn, announce: Say = lambda text: None
    ) -> None:
        self._warn, announce = _one_at_a_time(warn, announce)
        self._feeds = [Feed(service, run, self._warn, announce) for service in services]
        if not services:
            announce("tracker: none but metrics.jsonl")
        for feed in self._feeds:
            feed.start()
        self._named = False  # or they took too long to start

    def wake(self) -> None:
        """Say that metrics.jsonl has a new record. Returns at once."""
        for feed in self._feeds:
            feed.wake()

    def wait_until_named(self) -> None:
        """Wait until all trackers have said where they are, or do not start. Only the first call waits, and not long.

        It waits OPEN_SECONDS at most.
        """
        deadline = time.monotonic() + OPEN_SECONDS
        for feed in self._feeds if not self._named else ():
            feed.started.wait(max(0.0, deadline - time.monotonic()))
        self._named = True

    def close(self, exit_code: int) -> None:
        """Send what is left and finish, within CLOSE_SECONDS. A run that goes on later goes on under the same id."""
        for feed in self._feeds:
            feed.finish(exit_code)
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        for feed in (one for one in self._feeds if one.is_alive()):
            feed.abandon()
            self._warn(
                f"{feed.service.name} did not finish within {CLOSE_SECONDS:.0f} s and is not waited for. {feed.remedy}"
            )
        self._feeds = []


class Feed(threading.Thread):
    """One tracker and its place in metrics.jsonl."""

    def __init__(self, service: Service, run: TrackedRun, warn: Say, announce: Say) -> None:
        super().__init__(name=f"tracking {service.name}", daemon=True)
        self.service = service
        self.remedy = f"`{pasteable('gspo-hpc sync RUN', run.path)}` sends what is missing"
        self._run, self._warn, self._announce = run, warn, announce
        self.started = threading.Event()  # its place is announced, or it does not start
        self._news = threading.Event()
        self._exit_code: int | None = None
        self._abandoned = False

    def wake(self) -> None:
        """Say that there is a new record."""
        self._news.set()

    def finish(self, exit_code: int) -> None:
        """Ask for the end, once everything is sent."""
        self._exit_code = exit_code
        self._news.set()

    def abandon(self) -> None:
        """Let the process end while the tracker hangs; nothing is said of it any more."""
        self._abandoned = True
        self.service.abandon()

    def run(self) -> None:
        """Open the tracker, send it what it lacks and what comes, and close it."""
        did = "start"
        try:
            tracker = self.service.open(self._run, self._warn)
            if tracker is None:
                return
            self._announce(f"tracker: {tracker.place}")
            self.started.set()
            did = "take a record"
            self._feed(tracker)
        except Exception as error:  # whatever it is, it must not end the run
            if self._abandoned:
                return
            self._warn(
                f"{self.service.name} did not {did} ({in_one_line(error)}); the run goes on without it. {self.remedy}"
            )
        finally:
            self.started.set()

    def _feed(self, tracker: Tracker) -> None:
        reader = MetricsReader(RunDir(self._run.path), tracker.sent)
        while True:
            self._news.clear()
            code = self._exit_code  # before the look: what was logged before the end is sent before it
            deliver(tracker, reader)
            if code is not None:
                tracker.close(code)
                return
            self._news.wait(_POLL)


def deliver(tracker: Tracker, reader: MetricsReader) -> list[int]:
    """Send a tracker all records that are there now; return their steps."""
    sent: list[int] = []
    while records := reader.read():
        tracker.log(records)
        sent += [record.step for record in records]
    return sent
