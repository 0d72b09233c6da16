"""Checkpoints that are killed while they are written, and ones that are damaged afterwards: one is always whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.runs import commit
from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import SlurmRun


@pytest.mark.timeout(600)
def test_killed_at_every_call_of_a_save(undisturbed: SlurmRun, tmp_path: Path) -> None:
    """In a job step of the Slurm on which the run was that begins this."""
    words = [sys.executable, "-m", "tests.slurm.killed_saves", str(undisturbed.run_dir), str(tmp_path)]
    step = ["srun", "--partition=low", "--ntasks=1", "--export=ALL"]
    done = subprocess.run(
        [*step, *words], capture_output=True, text=True, env=runs.environment(), cwd=harness.PROJECT, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()[-1]
    assert all(f"'{name}'" in told for name in ("write", "fsync", "rename", "unlink")), told


@pytest.mark.parametrize("how", ["shorter by a byte", "one bit flipped", "gone"])
def test_any_damaged_file_is_noticed(undisturbed: SlurmRun, tmp_path: Path, how: str) -> None:
    """Of every file of the newest checkpoint; test_commands.py goes on with a run from the one before."""
    root = tmp_path / "checkpoints"
    shutil.copytree(undisturbed.run_dir / "checkpoints", root)
    before, newest = commit.list_committed(root)[-2:]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        if how == "gone":
            path.unlink()
        elif content:
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            path.write_bytes(content[:-1] if how == "shorter by a byte" else flipped)
        else:
            continue  # nothing in it to lose
        found, remarks = commit.newest_whole(root)
        assert found == before, (path.name, how)
        assert len(remarks) == 1 and f"checkpoint {int(newest.name)} is damaged and not used" in remarks[0], path.name
        path.write_bytes(content)
    assert commit.newest_whole(root) == (newest, [])
