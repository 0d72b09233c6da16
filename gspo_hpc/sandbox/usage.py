"""Use of tasks, memory and processor time by a process and all its descendants, as /proc shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """The use of several processes together."""

    processes: list[int]
    tasks: int  # processes and threads
    memory: int  # bytes that are resident; what several share counts for each
    cpu_seconds: float  # with that of children that ended and were waited for


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


def of(processes: list[int]) -> Usage:
    """Return what these processes use; those that are gone use nothing."""
    tasks, memory, ticks = 0, 0, 0
    for process in processes:
        place = Path(f"/proc/{process}")
        try:
            # Behind the name, which may hold anything: state first, times 12th to 15th, threads 18th.
            fields = (place / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            resident = int((place / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        tasks += int(fields[17])
        ticks += sum(map(int, fields[11:15]))
        memory += resident * _PAGE
    return Usage(processes, tasks, memory, ticks / _TICKS)
