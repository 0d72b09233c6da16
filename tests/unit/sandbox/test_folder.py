"""The folder of a program, whatever the program made of it. It takes about a second.

It would catch a folder that stays behind on a node, and one whose size is not seen.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest

from gspo_hpc.sandbox import folder


def nest(top: Path, depth: int) -> None:
    """Make folders within folders, deeper than a path can name."""
    place = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=place)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)


def closed(top: Path) -> None:
    for name, mode in (("a", 0o300), ("a/b", 0o300), ("a/b/c", 0), ("d", 0)):
        (top / name).mkdir(mode)
    (top / "a" / "b" / "f").touch(mode=0)
    top.chmod(0o100)


def odd(top: Path) -> None:
    for name in (b"\xff\n", b"-rf", b"0", b"0/0", b"0/1", b"0/1/0", b"1", b"1/0", b"2"):
        os.mkdir(os.fsencode(top) + b"/" + name)
    (top / "up").symlink_to("..")
    (top / "1" / "root").symlink_to("/")
    os.mkfifo(top / "1" / "pipe")


@pytest.mark.parametrize("make", [lambda top: nest(top, 3000), closed, odd, lambda top: None])
def test_any_folder_is_removed(make: object, tmp_path: Path) -> None:
    (tmp_path / "beside").write_text("kept")
    top = tmp_path / "own"
    top.mkdir()
    assert callable(make)
    make(top)
    folder.remove(str(top))
    assert sorted(os.listdir(tmp_path)) == ["beside"]


def test_what_a_folder_holds_is_counted(tmp_path: Path) -> None:
    assert folder.used(str(tmp_path), 1 << 30) == 0
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "empty").touch()
    (tmp_path / "inner" / "large").write_bytes(bytes(1 << 20))
    (tmp_path / "up").symlink_to("/usr")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert (1 << 20) + 4 * 4096 <= folder.used(str(tmp_path), 1 << 30) < (1 << 20) + 64 * 4096
    assert folder.used(str(tmp_path), 10) > 10
    nest(tmp_path / "inner", 100)
    with pytest.raises(folder.TooFar):
        folder.used(str(tmp_path), 1 << 30)
    folder.remove(str(tmp_path / "inner"))


def test_files_without_a_name_are_counted(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    before = folder.unnamed([os.getpid()], device)
    with (tmp_path / "gone").open("wb") as file, (tmp_path / "there").open("wb") as other:
        for one in (file, other):
            one.write(bytes(1 << 20))
            one.flush()
        (tmp_path / "gone").unlink()
        assert folder.unnamed([os.getpid()], device) - before == 1 << 20
        assert folder.unnamed([os.getpid()], device + 1) == folder.unnamed([1 << 22], device) == 0


def test_a_folder_that_changes_under_the_look_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that moves from a folder that comes later to one that came before is in neither, so the sum is no sum."""
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "f").write_bytes(bytes(1 << 20))
    with pytest.raises(folder.Changed):
        folder.used(str(tmp_path), 1 << 30, moving=True)  # it changed a moment ago
    for place in (tmp_path, tmp_path / "a", tmp_path / "b"):
        os.utime(place, (1e9, 1e9))
    assert folder.used(str(tmp_path), 1 << 30, moving=True) >= 1 << 20
    looked, scan = [], os.scandir

    def moves(place: str) -> object:
        looked.append(os.path.basename(place))
        found = scan(place)
        if looked[-1] in "ab" and len(looked) == 2:  # the first of the two: what is in the other comes here
            found = list(found)
            here, there = looked[-1], "ab".replace(looked[-1], "")
            for source, target in ((there, here), (here, there)):
                if (tmp_path / source / "f").exists():
                    os.rename(tmp_path / source / "f", tmp_path / target / "f")
                    break
            return contextlib.nullcontext(found)
        return found

    monkeypatch.setattr(os, "scandir", moves)
    for moving in (False, True):
        looked.clear()
        for place in (tmp_path, tmp_path / "a", tmp_path / "b"):
            os.utime(place, (1e9, 1e9))
        with pytest.raises(folder.Changed):
            folder.used(str(tmp_path), 1 << 30, moving=moving)


def test_files_that_are_only_mapped_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "gone").open("w+b") as file, (tmp_path / "there").open("w+b") as other:
        for one in (file, other):
            one.write(bytes(1 << 20))
            one.flush()
        kept = [mmap.mmap(one.fileno(), 4096) for one in (file, other)]
        inode = os.fstat(file.fileno()).st_ino
        assert folder.mapped([os.getpid()], str(tmp_path), 5 << 20) == {}
        (tmp_path / "gone").unlink()
        found = folder.mapped([os.getpid()], str(tmp_path), 5 << 20)
        assert found == {inode: 5 << 20} and folder.mapped([os.getpid()], str(tmp_path / "x"), 1) == {}
        device = tmp_path.stat().st_dev
        # Open, its size is known; once it is only mapped, the most that it may have counts.
        assert folder.unnamed([os.getpid()], device, found) == folder.unnamed([os.getpid()], device)
    assert len(kept) == 2 and folder.unnamed([], device, found) == 5 << 20
