"""The folder of a program: how much it holds, and its removal, whatever the program made of it.

A program may nest folders deeper than a path can name, and take its own permissions away. Where this code cannot see
into a folder the program has gone too far, and the folder is removed all the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_LEAST = 4096  # bytes that anything counts for, because a name and an inode take room, too
_DEPTH = 64  # of folders


class TooFar(Exception):
    """A folder cannot be looked at: it is too deep, or closed."""


def used(folder: str, most: int) -> int:
    """Return the bytes that a folder holds on the disk, or the first number above `most` that was counted.

    Raises TooFar where they cannot be counted.
    """
    total, places = 0, [(folder, 0)]
    while places and total <= most:
        place, depth = places.pop()
        if depth > _DEPTH:
            raise TooFar
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        total += max(_LEAST, 512 * entry.stat(follow_symlinks=False).st_blocks)
                        if entry.is_dir(follow_symlinks=False):
                            places.append((entry.path, depth + 1))
                    if total > most:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            raise TooFar from None
    return total


def unnamed(processes: Iterable[int], device: int) -> int:
    """Return the bytes in files that these processes hold open on a device and that have no name any more."""
    found: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(OSError):  # it is gone, or another's
            for place in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    about = place.stat()
                    if about.st_dev == device and about.st_nlink == 0 and stat.S_ISREG(about.st_mode):
                        found[about.st_ino] = 512 * about.st_blocks
    return sum(found.values())


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
