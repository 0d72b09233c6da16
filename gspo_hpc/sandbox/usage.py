"""Use of tasks, memory and processor time by a process and all its descendants, as /proc shows it."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
STOPPED, IN_THE_KERNEL = "TtZX", "D"  # states of tasks: stopped or ended; waiting where no signal but SIGKILL comes


class Usage(NamedTuple):
    """The use of several processes together."""

    processes: list[int]
    tasks: int  # processes and threads
    memory: int  # bytes that are resident; what several share counts for each
    cpu_seconds: float  # with that of processes that are gone


def children(process: int) -> list[int]:
    """Return the children of a process, those of all its threads. Raises FileNotFoundError where it is gone."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            found += map(int, (thread / "children").read_text().split())
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            if thread.exists():
                raise OSError("the kernel does not tell the children of a process (CONFIG_PROC_CHILDREN)") from None
    return found


def below(process: int) -> list[int]:
    """Return all descendants of a process."""
    found, left = [], [process]
    while left:
        try:
            more = children(left.pop())
        except FileNotFoundError:
            continue
        found += more
        left += more
    return found


def is_in(process: int, states: str) -> bool:
    """Tell whether all threads of a process are in one of these states, or it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] not in states:
                    return False
    return True


class Meter:
    """Meter of one program, look by look: it remembers processes that are gone, for whose time perhaps nobody asked."""

    def __init__(self) -> None:
        """Begin with no processes."""
        self._own: dict[tuple[int, int], int] = {}  # the most ticks seen of a process, by number and start

    def look(self, processes: list[int]) -> Usage:
        """Return what these processes use; those that are gone use nothing but the time that they had when last seen.

        The processor time is the larger of two counts that each may lack some: that of the living, with all children
        that they or this process waited for, and that of all processes that were ever seen.
        """
        tasks, memory, ticks = 0, 0, 0
        for process in processes:
            place = Path(f"/proc/{process}")
            try:
                # Behind the name, which may hold anything: state first, times 12th to 15th, threads 18th, start 20th.
                fields = (place / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                memory += _resident(place) * _PAGE
            except (FileNotFoundError, ProcessLookupError):
                continue
            own = int(fields[11]) + int(fields[12])
            key = process, int(fields[19])
            self._own[key] = max(own, self._own.get(key, 0))
            tasks += int(fields[17])
            ticks += own + int(fields[13]) + int(fields[14])
        buried = resource.getrusage(resource.RUSAGE_CHILDREN)  # orphans that this process adopted
        waited = ticks / _TICKS + buried.ru_utime + buried.ru_stime
        return Usage(processes, tasks, memory, max(waited, sum(self._own.values()) / _TICKS))


def _resident(place: Path) -> int:
    """Return the resident pages of a process: of any thread, as the first shows none once it has ended."""
    if pages := int((place / "statm").read_text().split()[1]):
        return pages
    for thread in (place / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pages := int((thread / "statm").read_text().split()[1]):
                return pages
    return 0
