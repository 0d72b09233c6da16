"""The disk of a run becomes full: one line says so, nothing that was saved is lost, and with space it goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.runs import commit
from tests.run import harness as runs
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@pytest.mark.timeout(600)
def test_the_disk_is_full(cluster: Cluster, tiny_config: Path, undisturbed: SlurmRun, small_disk: Path) -> None:
    run = SlurmRun(tiny_config, small_disk / "run", grader_seconds=0.2).submit()
    try:
        run.wait_for("two steps", lambda: run.last_step() >= 2)
        fill(small_disk / "filler")
        run.wait_until_ended("FAILED", timeout=180)
        lines = [line for line in run.log().splitlines() if "the disk is full" in line]
        assert lines and "free some space" in lines[-1], run.log()
        assert "Traceback" not in run.log()
        (ended,) = run.attempts()
        assert ended["reason"] == "failed" and "the disk is full" in ended["detail"], ended
        steps = [path for path in (run.run_dir / "checkpoints").iterdir() if path.name.isdigit()]
        assert steps and all(commit.verify(path) == [] for path in steps)
        code, found = runs.diagnose(run.run_dir)
        assert code == 1 and "disk_full" in found, (found.keys(), run.attempts(), run.log())
        assert found["disk_full"]["severity"] == "problem", found
        assert "checkpoint.keep=1" in found["disk_full"]["settings"]

        (small_disk / "filler").unlink()
        run.submit()
        run.wait_until_ended()
        assert_equal(run, undisturbed)
        assert not list((run.run_dir / "checkpoints").glob(".*"))
        assert runs.diagnose(run.run_dir)[1]["disk_full"]["severity"] == "warning", "it got over it"
    finally:
        subprocess.run(["scancel", run.job_id], capture_output=True, check=False)
