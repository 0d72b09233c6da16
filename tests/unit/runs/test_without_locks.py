"""A run directory on a file system without flock, such as Lustre mounted without it: refused, and in one line.

Catches a run that starts there without a lock, and a check of the nodes that ends with a traceback. Takes a second.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from gspo_hpc.doctor import files, meeting
from gspo_hpc.doctor.finding import Section
from gspo_hpc.runs.directory import RunDir


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get, autouse=True)
def why(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """No file system of this machine refuses flock, so the system call is replaced; return what it says."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return os.strerror(request.param)


def test_no_run_starts_there(why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this file system has no file locks") as error, RunDir(tmp_path).lock():
        pass
    assert why in str(error.value) and "-o flock" in str(error.value) and str(error.value).count("\n") == 0
    assert RunDir(tmp_path).holder() is None, "nobody can run it"


def test_doctor_names_the_mount_option(why: str, tmp_path: Path) -> None:
    section = Section("files")
    (tmp_path / "file").touch()
    assert not files.try_lock(section, tmp_path / "file", tmp_path)
    (found,) = section.findings
    assert (found.state, why in found.finding, "-o flock" in found.fix) == ("fail", True, True)


def test_nodes_that_meet_say_so(why: str, tmp_path: Path) -> None:
    host = meeting.Host(tmp_path, "n1", 2)
    try:
        found = {one.check: one for one in meeting.visit(tmp_path, 1)}
    finally:
        host.close(0.0)
    assert (found["lock between nodes"].state, found["between nodes"].state) == ("fail", "ok")
    assert f"locks do not work: {why}" in found["lock between nodes"].finding
