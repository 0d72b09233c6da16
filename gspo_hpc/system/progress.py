"""Count how often the main thread of this process moves on.

A rank that hangs in a collective still sends its heartbeat from another thread, but its count stands still. So a
watcher (control.py) tells a rank that hangs from one that works.
"""

from __future__ import annotations

_marks = 0
_phase = "started"


def mark(phase: str) -> None:
    """Record that the main thread moved on, in `phase`.

    Call it at least once in every piece of work that may take long.
    """
    global _marks, _phase
    _marks += 1
    _phase = phase


def marks() -> tuple[int, str]:
    """Return the number of calls of :func:`mark` so far and the phase named by the last one."""
    return _marks, _phase
