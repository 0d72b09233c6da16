"""The folder of a program: how much it holds, and its removal, whatever the program made of it.

A program may nest folders deeper than a path can name, and take its own permissions away. Where this code cannot see
into a folder the program has gone too far, and the folder is removed all the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

_LEAST = 4096  # bytes that anything counts for, because a name and an inode take room, too
_DEPTH = 64  # of folders
_COARSE = 20_000_000  # nanoseconds: the kernel's clock of file times may be that much behind


class TooFar(Exception):
    """A folder cannot be looked at: it is too deep, or closed."""


class Changed(Exception):
    """A folder was changed while it was looked at, so that something in it may not have been seen."""


def used(folder: str, most: int, *, moving: bool = False) -> int:
    """Return the bytes that a folder holds on the disk, or the first number above `most` that was counted.

    Raises TooFar where they cannot be counted, and Changed where names in it changed meanwhile: what moves from a
    folder that comes later to one that came before is seen in neither. `moving`: others change it, so that also a
    change just before the look counts as one, because times of files are coarse.
    """
    began = time.time_ns() - _COARSE
    total, places = 0, [(folder, 0)]
    seen: dict[str, int] = {}  # folders, with the times of their last changes
    try:
        while places and total <= most:
            place, depth = places.pop()
            if depth > _DEPTH:
                raise TooFar
            seen[place] = os.lstat(place).st_mtime_ns
            with os.scandir(place) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    total += max(_LEAST, 512 * about.st_blocks)
                    if stat.S_ISDIR(about.st_mode):
                        places.append((entry.path, depth + 1))
                    if total > most:
                        return total
        times = ((os.lstat(place).st_mtime_ns, before) for place, before in seen.items())
        changed = any(now != before or (moving and now > began) for now, before in times)
    except (FileNotFoundError, NotADirectoryError):
        raise Changed from None
    except OSError:
        raise TooFar from None
    if changed:
        raise Changed
    return total


def unnamed(processes: Iterable[int], device: int, mapped: Mapping[int, int] = MappingProxyType({})) -> int:
    """Return the bytes in files that these processes hold open on a device and that have no name any more.

    With those in `mapped`, by inode, of which nothing more is known where they are not open.
    """
    found = dict(mapped)
    for thread in _threads(processes):  # each may have files of its own, and the first has none once it has ended
        with contextlib.suppress(OSError):  # it is gone, or another's
            for place in (thread / "fd").iterdir():
                with contextlib.suppress(OSError):
                    about = place.stat()
                    if about.st_dev == device and about.st_nlink == 0 and stat.S_ISREG(about.st_mode):
                        found[about.st_ino] = 512 * about.st_blocks
    return sum(found.values())


def mapped(processes: Iterable[int], folder: str, file_bytes: int) -> dict[int, int]:
    """Return the files of a folder that have no name any more and that these processes have mapped, by inode.

    How large such a file is the kernel does not tell everybody. Each counts as `file_bytes`, the most that it may hold.
    """
    found, begin = {}, os.fsencode(os.path.realpath(folder)) + b"/"
    for thread in _threads(processes):
        with contextlib.suppress(OSError):
            for line in (thread / "maps").read_bytes().splitlines():
                fields = line.split(None, 5)  # addresses, rights, offset, device, inode, name
                if len(fields) == 6 and fields[5].startswith(begin) and fields[5].endswith(b" (deleted)"):
                    found[int(fields[4])] = file_bytes
    return found


def _threads(processes: Iterable[int]) -> Iterator[Path]:
    for process in processes:
        with contextlib.suppress(OSError):
            yield from Path(f"/proc/{process}/task").iterdir()


def remove(folder: str) -> None:
    """Remove a folder and all that is in it. Nothing else may change it meanwhile.

    What lies deeper is moved up before it is removed, so no path grows long.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(top, 0o700)
        moved = 0
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for deeper in os.listdir(inner):
                        if not stat.S_ISDIR(os.stat(deeper, dir_fd=inner, follow_symlinks=False).st_mode):
                            os.unlink(deeper, dir_fd=inner)
                            continue
                        os.chmod(deeper, 0o700, dir_fd=inner)
                        while _is_there(f"{moved}", top):
                            moved += 1
                        os.rename(deeper, f"{moved}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
