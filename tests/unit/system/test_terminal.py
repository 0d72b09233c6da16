"""How printed commands begin, so that they can be pasted. A second. It would catch one that the shell does not find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.system.terminal import program


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter in a folder of its own, with the program beside it, neither of them on PATH."""
    folder = tmp_path / "an environment" / "bin"
    folder.mkdir(parents=True)
    (folder / "gspo-hpc").write_text(f'#!/bin/sh\nexec {sys.executable} -m gspo_hpc "$@"\n')
    (folder / "gspo-hpc").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return folder


def test_the_name_alone_where_path_has_this_program(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{python}:/usr/bin:/bin")
    assert program() == "gspo-hpc"


def test_else_its_path_which_a_shell_runs(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == f"'{python}/gspo-hpc'"
    done = subprocess.run(f"{program()} --version", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("gspo-hpc "), done.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "gspo-hpc").write_text("#!/bin/sh\n")
    (tmp_path / "other" / "gspo-hpc").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:/usr/bin:/bin")
    assert program() == f"'{python}/gspo-hpc'", "that of another environment is not this one"


def test_python_runs_it_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    os.unlink(python / "gspo-hpc")
    assert program() == f"'{python}/python' -m gspo_hpc"
