"""The part of a node's memory, or of what this job may use of it, that is in use. Linux only.

Slurm, Kubernetes and container runtimes limit a job's memory by control groups. The kernel ends processes at whatever
comes first: the limit of the group of this process, that of a group above it, or the node's memory. Files that the
kernel has cached and gives back count for none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # where /proc and /sys are
# Name of the controller in /proc/self/cgroup, mount point, files of use and limit, and the key of the cache in
# memory.stat: of version 2, of version 2 beside version 1, and of version 1.
_VERSIONS = (
    ("", "sys/fs/cgroup", "memory.current", "memory.max", "inactive_file"),
    ("", "sys/fs/cgroup/unified", "memory.current", "memory.max", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
)


def used() -> float:
    """Return the largest of these parts, from 0 to 1."""
    found = _pairs(ROOT / "proc" / "meminfo")
    total = found["MemTotal"] * 1024
    parts = [1.0 - found["MemAvailable"] / found["MemTotal"]]
    parts += [
        use / limit for use, limit in _groups() if limit < total
    ]  # version 1 has a huge limit where there is none
    return max(parts)


def _groups() -> Iterator[tuple[int, int]]:
    """Yield use and limit in bytes of the groups of this process that have a limit."""
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
