"""Count how often the main thread of this process moves on, and say where it may stand still.

A rank that hangs in a collective still sends its heartbeat from another thread, but its count stands still. So a
watcher (control.py) tells a rank that hangs from one that works. While a run starts, one rank may work for a long time
and others wait for it: those that wait say so, and the watcher looks at the one that they wait for.

Other threads work beside the main thread, as the one that writes a checkpoint. What they do says nothing about the main
thread, and is not counted, except while the main thread waits for them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

STARTED = "started"  # the phase of a process that has not joined the others
WAITS, LIMITED = "waits", "limited"  # why a count that stands still is no sign of a hang

_marks = 0
_phase = STARTED
_excuse: str | None = None
_until = math.inf  # time.monotonic() at which the excuse of the main thread ends
_excuses_beside: dict[int, str] = {}  # of other threads, by their identifiers
_follows = False  # the main thread waits for other threads


def mark(phase: str | None = None) -> None:
    """Record that this thread moved on, the main thread in `phase`; by default in the one that it was in.

    Call it at least once in every piece of work that may take long.
    """
    global _marks, _phase
    if _beside():
        _marks += _follows
        return
    _marks += 1
    _phase = phase or _phase


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Say that the main thread waits in this block for other threads of this process: it moves on while they do."""
    global _follows
    if _beside():
        yield
        return
    _follows = True
    try:
        yield
    finally:
        if _excuses_beside:
            mark()  # before the excuse of another thread no longer counts
        _follows = False


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Say that this thread waits in this block for other ranks, however long these take."""
    with _excused(WAITS):
        yield


@contextlib.contextmanager
def limited(seconds: float = math.inf) -> Iterator[None]:
    """Say that what this thread does in this block ends in any case, by a time limit of its own.

    Give `seconds` where it has no limit of its own: after them, a main thread that stands still counts as hung.
    """
    with _excused(LIMITED, seconds):
        yield


@contextlib.contextmanager
def _excused(why: str, seconds: float = math.inf) -> Iterator[None]:
    global _excuse, _until
    if _beside():
        _excuses_beside[threading.get_ident()] = why
        try:
            yield
        finally:
            mark()  # first, as below
            _excuses_beside.pop(threading.get_ident(), None)
        return
    before, _until, _excuse = (_excuse, _until), time.monotonic() + seconds, why
    try:
        yield
    finally:
        mark()  # first: who reads between the two sees a rank that moves, not one that stands still without an excuse
        _excuse, _until = before


def _beside() -> bool:
    """Return True in every thread but the main one."""
    return threading.get_ident() != threading.main_thread().ident


def marks() -> tuple[int, str, str | None]:
    """Return the count of :func:`mark`, its last phase, and why the main thread may stand still now, if it may."""
    excuse = _excuse if time.monotonic() < _until else None  # first, for the same reason
    if excuse is None and _follows:
        excuse = next(iter(tuple(_excuses_beside.values())), None)
    return _marks, _phase, excuse
