"""A node's memory, and what this job may use of it: how much is in use, and how much is left. Linux only.

Slurm, Kubernetes and container runtimes limit a job's memory by control groups. The kernel ends processes at whatever
comes first: the limit of the group of this process, that of a group above it, or the node's memory. Files that the
kernel has cached and gives back count for none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")  # where /proc and /sys are
# Name of the controller in /proc/self/cgroup, mount point, files of use and limit, and the key of the cache in
# memory.stat: of version 2, of version 2 beside version 1, and of version 1.
_VERSIONS = (
    ("", "sys/fs/cgroup", "memory.current", "memory.max", "inactive_file"),
    ("", "sys/fs/cgroup/unified", "memory.current", "memory.max", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
)


class Room(NamedTuple):
    """Memory that is left to this process."""

    size: int  # bytes
    limited: bool  # by a control group, not by the node


def total() -> int:
    """Return the bytes of memory of this node."""
    return _node()[1]


def used() -> float:
    """Return the largest part in use of what is limited, from 0 to 1."""
    use, size = _node()
    # Version 1 has a huge limit where there is none.
    return max([use / size, *(held / limit for held, limit in _groups() if limit < size)])


def left() -> Room:
    """Return the bytes that this process can still use before the kernel ends processes."""
    use, size = _node()
    groups = [max(0, limit - held) for held, limit in _groups()]
    least = min(groups, default=size)
    return Room(least, limited=True) if least < size - use else Room(size - use, limited=False)


def _node() -> tuple[int, int]:
    """Return use and size of the node's memory in bytes."""
    found = _pairs(ROOT / "proc" / "meminfo")
    return (found["MemTotal"] - found["MemAvailable"]) * 1024, found["MemTotal"] * 1024


def _groups() -> Iterator[tuple[int, int]]:
    """Yield use and limit in bytes of the groups of this process that have a limit. Cached files do not count."""
    for line in (ROOT / "proc" / "self" / "cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        for controller, mount, use, limit, cached in _VERSIONS:
            if controller not in controllers.split(","):
                continue
            path = PurePosixPath(group)
            for one in (path, *path.parents):
                folder = ROOT / mount / str(one).lstrip("/")
                with contextlib.suppress(OSError, ValueError, KeyError):  # not there, "max", or not its controller
                    found = int((folder / use).read_text())
                    most = int((folder / limit).read_text())
                    yield found - _pairs(folder / "memory.stat")[cached], most


def _pairs(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
