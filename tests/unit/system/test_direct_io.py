"""What is written past the page cache is what is in the file and in its hash, in whatever pieces it comes."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.system import direct_io
from gspo_hpc.system.direct_io import BLOCK, Writer

SMALL = 4 * BLOCK  # of a buffer, so that a few pieces fill it
sizes = st.lists(st.integers(0, 3 * SMALL) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, SMALL, SMALL + 1]), max_size=6)


def write(path: Path, pieces: list[bytes]) -> Writer:
    with Writer(path) as file:
        for number, piece in enumerate(pieces):
            assert file.tell() == sum(map(len, pieces[:number]))
            assert file.write(piece) == len(piece)
    return file


def is_whole(path: Path, file: Writer, pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    assert path.read_bytes() == content
    assert file.entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert path.stat().st_mode & 0o777 == 0o600


@settings(deadline=None)  # a disk may take its time
@given(sizes)
def test_any_pieces(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    path = tmp_path_factory.mktemp("direct") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "BUFFER", SMALL)
        is_whole(path, write(path, pieces), pieces)


def test_more_than_a_real_buffer_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 * direct_io.BUFFER))
    pieces = [os.urandom(direct_io.BUFFER // 2 + 1) for _ in range(5)]
    is_whole(path, write(path, pieces), pieces)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Some refuse to open such a file, and some to write blocks of this size."""
    opened, written, refusals = os.open, os.write, []

    def is_direct(fd: int) -> bool:
        flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        return bool(flags & os.O_DIRECT)

    def refuse() -> OSError:
        refusals.append(refused)
        return OSError(errno.EINVAL, "Invalid argument")

    def open_(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            raise refuse()
        return opened(path, flags, *arguments, **named)

    def write_(fd: int, data: Any) -> int:
        if is_direct(fd):
            raise refuse()
        return written(fd, data)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write_)
    pieces = [os.urandom(3 * BLOCK), os.urandom(5)]
    is_whole(tmp_path / "file", write(tmp_path / "file", pieces), pieces)
    assert refusals == [refused]


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written(fd, data[:BLOCK]))
    pieces = [os.urandom(7 * BLOCK + 3)]
    is_whole(tmp_path / "file", write(tmp_path / "file", pieces), pieces)


def test_an_error_is_passed_on_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"), Writer(tmp_path / "file") as file:
        file.write(b"x" * BLOCK)
    assert file.entry is None and os.listdir("/proc/self/fd") == before
    with pytest.raises(KeyError), Writer(tmp_path / "file") as file:
        file.write(b"x" * BLOCK)
        raise KeyError
    assert file.entry is None and os.listdir("/proc/self/fd") == before
