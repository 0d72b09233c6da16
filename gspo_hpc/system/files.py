"""Files that survive a kill and a full disk: atomic writes, appended lines, private modes, strict JSON.

Directories are 0700 and files 0600, whatever the umask is. A file is either appended to line by line, or written under
a temporary name, synced and renamed, so that a reader sees the old content or the new one, never a part of it. A line
that a kill cut off has no line break and is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import numbers
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.system.progress import mark
from gspo_hpc.system.text import parse_json

DISK_FULL = "the disk is full or over its quota"
Entry = dict[str, Any]  # a file in a manifest: {"size": bytes, "sha256": hexadecimal digits}

_VISIBLE = 120.0  # seconds within which a file that another node wrote must be here
_POLL_SECONDS = 0.05
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def plain_disk_full(path: Path) -> Iterator[None]:
    """Turn the error of a full disk inside this block into one OSError that names `path` and the fix."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        text = f"cannot be written: {DISK_FULL}; free some space and start the same command again"
        raise OSError(error.errno, text, str(path)) from None


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. A new file gets mode 0600. Never follows a link."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o600)
    return fd


def open_log(path: Path) -> int:
    """Open a log to append to, made with mode 0600 if need be, and return its descriptor. Never follows a link."""
    return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def make_private_dir(path: Path) -> None:
    """Make a directory with mode 0700, unless it exists; missing parents get the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        sync_dir(path.parent)


def make_inner_dir(path: Path) -> None:
    """Make a directory that belongs to the one that it is in, as :func:`make_private_dir`. ValueError for a link."""
    refuse_link(path)
    make_private_dir(path)


def refuse_link(path: Path) -> None:
    """Raise ValueError for a link in the place of a directory: what is written or removed there would be elsewhere.

    The directory of a run may be of another's making.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and a run writes into its own directory: remove the link")


def sync_dir(path: Path) -> None:
    """Sync a directory: the names that were made or renamed in it are on disk afterwards."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to `fd`, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_or_cut(fd: int, data: bytes, size: int) -> None:
    """Write `data` at the end of a file of `size` bytes, and return when it is on disk; on an error, nothing of it."""
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, size)
        raise


def cut_torn_tail(fd: int) -> int:
    """Drop the part of a line that a killed writer left at the end; return the new size, where writing goes on."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)
    return os.lseek(fd, end, os.SEEK_SET)


def write_atomically(path: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Replace the content of `path`, on disk, or leave it as it was. Raises OSError, with a fix if the disk is full.

    Of an iterable, one piece is held at a time.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    if isinstance(data, str):
        data = data.encode()
    with plain_disk_full(path):
        fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                for piece in (data,) if isinstance(data, bytes) else data:
                    write_all(fd, piece)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically; numbers that are not finite become null."""
    write_atomically(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises ValueError if there is no file, or if it is not strict JSON: a key given twice, NaN, nested too deeply.
    """
    try:
        return parse_json(path.read_bytes(), unique=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def plain(value: Any) -> Any:
    """Return a value of plain JSON types: numpy's numbers become Python's, numbers that are not finite None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int):
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if math.isfinite(value) else None
    return value


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append each record as a line of JSON and sync the file; on an error, none of them."""
    data = "".join(json.dumps(plain(record), allow_nan=False) + "\n" for record in records).encode()
    with plain_disk_full(path):
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            size = cut_torn_tail(fd)
            write_or_cut(fd, data, size)
        finally:
            os.close(fd)
        if size == 0:
            sync_dir(path.parent)


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield (record, line) for every whole line; a last line without a line break was cut off by a kill."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if not line.startswith(b"{"):
                raise ValueError("not an object")
            record = parse_json(line)
        except ValueError:
            raise ValueError(f"{path}:{number}: not a JSON object; the file was changed from outside") from None
        yield record, line


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it. Every file counts as progress: a checkpoint has thousands of them."""
    for folder, _, names in os.walk(path):
        for name in names:
            os.unlink(os.path.join(folder, name))
            mark()
    shutil.rmtree(path)


def wait_until_visible(path: Path, size: int) -> None:
    """Wait until this node sees at least `size` bytes of a file that another one wrote.

    Raises TimeoutError if it does not within two minutes.
    """
    deadline = time.monotonic() + _VISIBLE
    while not _has_size(path, size):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}, which another node wrote, is not seen here after {_VISIBLE:.0f} s")
        time.sleep(_POLL_SECONDS)


def _has_size(path: Path, size: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.listdir(path.parent)  # NFS caches that a file did not exist
        return path.stat().st_size >= size
    return False
