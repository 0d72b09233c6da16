"""Limits of a program and the outcome of a run: plain values, which travel as JSON between processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_MEMORY_ERROR = re.compile(r"(?:[\w.]+\.)?\w*MemoryError\b|OSError: \[Errno 12\]")  # numpy has one of its own
_NO_ROOM = re.compile(r"OSError: \[Errno 28\]")

# The limits that end a program, each by the name of its setting.
Limit = Literal["seconds", "cpu_seconds", "memory_gb", "processes", "file_mb", "disk_mb", "output_kb"]
KINDS = ("bubblewrap", "landlock", "apptainer", "http")  # the ladder, from the top
Kind = Literal["bubblewrap", "landlock", "apptainer", "http"]


class SandboxError(RuntimeError):
    """The sandbox itself failed, and the program was not run to its end. Says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program: each of all its processes together, but for `file_bytes`."""

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 16  # and threads, at once
    file_bytes: int = 16 << 20  # of one file
    disk_bytes: int = 1 << 26  # of all files, of which each counts as 4 KiB or more
    output_bytes: int = 1 << 20  # of standard output, and of standard error


@dataclass(frozen=True)
class Outcome:
    """Account of what a program did."""

    stdout: str
    stderr: str
    status: int | None  # its exit status, or minus the number of the signal that ended it; None if a limit did
    limit: Limit | None = None  # the limit that it came up against
    seconds: float = 0.0  # from its start to its end

    @property
    def timed_out(self) -> bool:
        """Tell whether it took too long."""
        return self.limit in ("seconds", "cpu_seconds")

    @property
    def out_of_memory(self) -> bool:
        """Tell whether it needed more memory than it may use."""
        return self.limit == "memory_gb"

    @property
    def ended_well(self) -> bool:
        """Tell whether it ended by itself, with the exit status 0."""
        return self.status == 0 and self.limit is None

    @property
    def does_not_compile(self) -> bool:
        """Tell whether Python refused the program's text before anything of it ran."""
        lines = self.stderr.splitlines()
        refused = bool(lines) and lines[-1].startswith(("SyntaxError", "IndentationError", "TabError"))
        # An error of the program's own begins with "Traceback".
        return refused and self.status == 1 and lines[0].startswith(('  File "', "SyntaxError"))


def told_limit(status: int, stderr: str) -> Limit | None:
    """Return the limit that a program of Python ended at by itself: no memory was left for it, or no room for files."""
    last = stderr.strip().rpartition("\n")[2]
    if status and _MEMORY_ERROR.match(last):
        return "memory_gb"
    return "disk_mb" if status and _NO_ROOM.match(last) else None
