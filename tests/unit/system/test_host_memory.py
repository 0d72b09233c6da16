"""The memory that is in use and that is left, read from the files of three kinds of machine, and from this one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.system import host_memory as memory

GB = 10**9


def node(root: Path, available: float, group: str = "0::/") -> None:
    """Let Linux tell of a node with 100 GB, and of the groups of this process."""
    for path in ("proc/self", "sys/fs/cgroup"):
        (root / path).mkdir(parents=True, exist_ok=True)
    size, left = 100 * GB // 1024, int(available * 100) * GB // 1024
    (root / "proc/meminfo").write_text(f"MemTotal: {size} kB\nMemFree: 7 kB\nMemAvailable: {left} kB\nHugePages: 0\n")
    (root / "proc/self/cgroup").write_text(f"12:cpuset:/\n{group}\n")


def limited(folder: Path, use: float, cached: float, limit: str, version: int = 2) -> None:
    """A control group that uses so many GB."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.current", "memory.max", "inactive_file")
    if version == 1:
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{int(use * GB)}\n")
    (folder / names[1]).write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {int(cached * GB)}\n")


def in_gb(size: int) -> float:
    return round(size / GB, 3)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    return tmp_path


def test_without_limits_the_node_counts(root: Path) -> None:
    node(root, available=0.25)
    assert memory.used() == pytest.approx(0.75)
    assert not memory.left().limited and in_gb(memory.left().size) == in_gb(memory.total()) / 4 == 25


def test_a_job_ends_at_the_limit_of_any_group_above_it_and_its_cached_files_do_not_count(root: Path) -> None:
    node(root, available=0.9, group="0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1")
    job = root / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    limited(job / "step_0/user/task_1", use=3, cached=0, limit="max")
    assert memory.used() == pytest.approx(0.1)
    assert memory.left() == memory.Room(memory.left().size, limited=False)
    limited(job, use=19, cached=3, limit=str(20 * GB))
    assert memory.used() == pytest.approx(0.8)
    assert memory.left() == (4 * GB, True)
    limited(job.parent, use=30, cached=0, limit=str(29 * GB))
    assert memory.left() == (0, True), "never less than nothing"


def test_a_limit_above_what_the_node_has_left_is_not_reached(root: Path) -> None:
    node(root, available=0.25, group="0::/job")
    limited(root / "sys/fs/cgroup/job", use=1, cached=0, limit=str(90 * GB))
    assert not memory.left().limited and in_gb(memory.left().size) == 25


def test_version_2_beside_version_1(root: Path) -> None:
    """A hybrid machine, whose groups of version 2 are in a folder of their own, and may have the controller."""
    node(root, available=0.9, group="0::/job")
    limited(root / "sys/fs/cgroup/unified/job", use=19, cached=3, limit=str(20 * GB))
    assert memory.used() == pytest.approx(0.8) and memory.left() == (4 * GB, True)


def test_version_1_with_and_without_a_limit(root: Path) -> None:
    node(root, available=0.9, group="4:memory:/slurm/uid_0/job_7")
    job = root / "sys/fs/cgroup/memory/slurm/uid_0/job_7"
    limited(job, use=90, cached=0, limit="9223372036854771712", version=1)
    assert memory.used() == pytest.approx(0.1)
    assert not memory.left().limited
    limited(job, use=12, cached=2, limit=str(20 * GB), version=1)
    assert memory.used() == pytest.approx(0.5) and memory.left() == (10 * GB, True)


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOT", Path("/"))
    assert 0.0 < memory.used() < 1.0 and 0 < memory.left().size < memory.total()
