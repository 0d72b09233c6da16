"""Write a file past the page cache, if its file system allows that, and hash it meanwhile.

A checkpoint is written while training goes on, and read again only after a crash. Hashing its file would read it at
once, and on a host that is short of memory the page cache costs several times the CPU time of the write itself. Whole
blocks go to the disk from one aligned buffer with O_DIRECT (open(2)), the last piece without it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gspo_hpc.system.files import Entry, open_private
from gspo_hpc.system.progress import mark

BLOCK = 4096  # bytes: O_DIRECT wants offsets and sizes that are multiples of it, on all common disks
BUFFER = 8 << 20  # bytes


class Writer:
    """A new private file at `path`, with `write` and `tell` of a binary file. Raises OSError as a file does.

    Nothing is synced here. After :meth:`close`, `entry` has the size and the hash of the file. After an exception
    inside its `with`, or without a close, the file is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.entry: Entry | None = None
        self._descriptor = _open(path)
        self._buffer = mmap.mmap(-1, BUFFER)  # aligned to a page
        self._filled = self._size = 0
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of `data`, an object with a contiguous buffer; return its size in bytes."""
        view = memoryview(data).cast("B")
        place = 0
        while place < len(view):
            piece = view[place : place + BUFFER - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            place += len(piece)
            self._filled += len(piece)
            if self._filled == BUFFER:
                self._flush(BUFFER)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: only :meth:`close` may write less than a buffer."""

    def close(self) -> None:
        """Write the rest and close the file. Calling it again does nothing."""
        if self._descriptor < 0:
            return
        try:
            self._flush(self._filled - self._filled % BLOCK)
            if self._filled:
                self._leave_direct()
                self._flush(self._filled)
        finally:
            self._abandon()
        self.entry = {"size": self._size, "sha256": self._hash.hexdigest()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close() if kind is None else self._abandon()

    def _flush(self, size: int) -> None:
        """Hash and write the first `size` bytes of the buffer, and move the rest to its start."""
        mark()
        rest = memoryview(self._buffer)[:size]
        self._hash.update(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._leave_direct():  # the file system needs larger blocks
                    raise
        self._filled -= size
        self._buffer.move(0, size, self._filled)

    def _leave_direct(self) -> bool:
        """Continue through the page cache; return False if that was so already."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def _abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return open_private(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without O_DIRECT, as some in memory or over a network
            raise
        return open_private(path, flags)
