"""Count how often the main thread of this process moves on, and say where it may stand still.

A rank that hangs in a collective still sends its heartbeat from another thread, but its count stands still. So a
watcher (control.py) tells a rank that hangs from one that works. While a run starts, one rank may work for a long time
and others wait for it: those that wait say so, and the watcher looks at the one that they wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

STARTED = "started"  # the phase of a process that has not joined the others
WAITS, LIMITED = "waits", "limited"  # why a count that stands still is no sign of a hang

_marks = 0
_phase = STARTED
_excuse: str | None = None


def mark(phase: str | None = None) -> None:
    """Record that the main thread moved on, in `phase`; by default in the one that it was in.

    Call it at least once in every piece of work that may take long.
    """
    global _marks, _phase
    _marks += 1
    _phase = phase or _phase


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Say that the main thread waits in this block for other ranks, however long these take."""
    with _excused(WAITS):
        yield


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Say that what the main thread does in this block ends in any case, by a time limit of its own."""
    with _excused(LIMITED):
        yield


@contextlib.contextmanager
def _excused(why: str) -> Iterator[None]:
    global _excuse
    before, _excuse = _excuse, why
    try:
        yield
    finally:
        mark()  # first: who reads between the two sees a rank that moves, not one that stands still without an excuse
        _excuse = before


def marks() -> tuple[int, str, str | None]:
    """Return the count of :func:`mark`, its last phase, and why the main thread may stand still now, if it may."""
    excuse = _excuse  # first, for the same reason
    return _marks, _phase, excuse
