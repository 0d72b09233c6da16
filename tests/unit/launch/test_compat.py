"""The private interfaces of submitit that launch/slurm/compat.py uses, in the installed version."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import submitit
from submitit.core.core import PicklingExecutor
from submitit.slurm.slurm import SlurmExecutor

from gspo_hpc.launch.slurm import compat


def nothing() -> None:
    """A task to hand in."""


@pytest.fixture
def executor(tmp_path: Path) -> compat.Executor:
    made = compat.Executor(folder=tmp_path, python="/opt/python")
    made.update_parameters(time=5, signal_delay_s=60, use_srun=False)
    return made


def test_the_installed_version_was_checked() -> None:
    assert submitit.__version__ in compat.TESTED, "run this file against the new version, then add it to compat.TESTED"


def test_the_private_names_have_the_signatures_that_are_used() -> None:
    text = inspect.signature(SlurmExecutor._make_submission_file_text)
    assert list(text.parameters) == ["self", "command", "uid"]
    assert isinstance(inspect.getattr_static(SlurmExecutor, "_submitit_command_str"), property)
    assert list(inspect.signature(SlurmExecutor.affinity).parameters) == []
    assert {"folder", "python"} <= set(inspect.signature(SlurmExecutor.__init__).parameters)
    assert issubclass(SlurmExecutor, PicklingExecutor)


def test_the_script_runs_submitits_module(executor: compat.Executor, tmp_path: Path) -> None:
    assert executor.script().rstrip().endswith(f"/opt/python -u -m submitit.core._submit {tmp_path}")
    assert executor.script("echo here").rstrip().endswith("echo here")


def sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_the_files_of_a_submission_have_the_names_that_adopt_gives_them(
    executor: compat.Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch(tmp_path, monkeypatch, "echo Submitted batch job 77")
    assert executor.hand_in(nothing) == "77"
    submitted = {path.name for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()}
    assert submitted == {"77_submitted.pkl", "77_submission.sh"}
    links = {path.name for path in tmp_path.iterdir() if path.is_symlink()}
    assert all(name.startswith(".submission_file_") and name.endswith(".sh") for name in links)


@pytest.mark.parametrize("taken", [True, False])
def test_a_submission_that_slurm_did_not_confirm_is_adopted_or_discarded(
    executor: compat.Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(compat.SubmitError, match=r"^sbatch: error: Unable to contact slurm controller$"):
        executor.hand_in(nothing)
    assert sum(path.is_file() for path in tmp_path.iterdir()) == 2  # a pickle and a script without an id
    if taken:
        compat.adopt(tmp_path, "78")
    else:
        compat.discard(tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == ({"78_submitted.pkl", "78_submission.sh"} if taken else set())
