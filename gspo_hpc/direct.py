"""A file that is hashed while it is written, and written past the page cache where its file system lets it.

Floor 1. A checkpoint is written beside training and, but for a crash, not read again. To hash it from its file it would
be read at once; and on a host that is short of memory the cache's pages for it cost several times the CPU of the
write itself. Whole blocks go to the disk from one aligned buffer with O_DIRECT (open(2)), the last piece the usual way.
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

from gspo_hpc.commit import Entry
from gspo_hpc.durable import open_private

BLOCK = 4096  # bytes: what O_DIRECT wants places and sizes to be multiples of, on every disk that is sold
BUFFER = 8 << 20  # bytes


class Writer:
    """A new private file at `path`, with `write` and `tell` of a binary file. Raises OSError as a file does.

    Nothing is synced here. After :meth:`close`, `entry` is what the file holds; after an exception inside its `with`,
    or without a close, what was written is of no use.
    """

    def __init__(self, path: Path) -> None:
        self.entry: Entry | None = None
        self._descriptor = _open(path)
        self._buffer = mmap.mmap(-1, BUFFER)  # begins at a page
        self._filled = self._size = 0
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """All of `data`, an object with a contiguous buffer; its size in bytes."""
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
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing: only :meth:`close` may write less than a buffer."""

    def close(self) -> None:
        """Write the rest. The second time, nothing."""
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
        """Hash and write the first `size` bytes of the buffer; what is behind them moves to its begin."""
        rest = memoryview(self._buffer)[:size]
        self._hash.update(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._leave_direct():  # it wants larger blocks
                    raise
        self._filled -= size
        self._buffer.move(0, size, self._filled)

    def _leave_direct(self) -> bool:
        """Go on through the page cache; whether it was otherwise so far."""
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
        if error.errno != errno.EINVAL:  # a file system that has no such way, as some in memory or over a network
            raise
        return open_private(path, flags)
