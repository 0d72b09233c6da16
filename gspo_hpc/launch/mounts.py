"""The file systems of this machine: which one holds a path, and whether files can be made in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Views of what the kernel or a service knows: nobody, not even root, makes a folder of files in them.
_VIEWS = {
    *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs", "tracefs", "configfs", "bpf", "pstore"),
    *("efivarfs", "mqueue", "binfmt_misc", "fusectl", "selinuxfs", "smackfs", "nsfs", "rpc_pipefs"),
}


@dataclass(frozen=True)
class Mount:
    """The mount that holds a path."""

    point: str
    kind: str  # ext4, nfs4 ...
    options: frozenset[str]

    @property
    def is_view(self) -> bool:
        """True for one that shows something else than files that somebody wrote."""
        return self.kind in _VIEWS


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """Find the mount of a path in the text of /proc/self/mountinfo (proc(5))."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        words = line.split()
        if "-" not in words[6:]:
            continue
        dash = words.index("-", 6)
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = frozenset(",".join((words[5], *words[dash + 3 :])).split(","))
            best = Mount(point, words[dash + 1], options)
    return best


def holding(path: Path) -> Mount | None:
    """Return the mount of a path of this machine; None where the kernel does not tell."""
    try:
        return mount_of(path, Path("/proc/self/mountinfo").read_text())
    except OSError:
        return None


def existing(path: str | Path) -> Path:
    """Return a path, or the nearest above it that exists."""
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place
