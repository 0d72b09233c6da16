"""How printed commands begin, so that they can be pasted. A second. It would catch one that the shell does not find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.cli import parser
from gspo_hpc.config import loader
from gspo_hpc.runs.directory import open_run
from gspo_hpc.system.terminal import COMMANDS, pasteable, program

ROOT = Path(__file__).parents[3]


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


def test_every_command_in_a_text_begins_so(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (python / "hf").write_text("#!/bin/sh\n")
    own = f"'{python}/gspo-hpc'"
    for text, wanted in {
        "`gspo-hpc sync RUN` sends it": f"`{own} sync 'runs/my run'` sends it",
        "gspo-hpc logs RUN --errors": f"{own} logs 'runs/my run' --errors",
        "(gspo-hpc plan shows others)": f"({own} plan shows others)",
        "gspo-hpc doctor CONFIG: checks": f"{own} doctor CONFIG: checks",
        "reached: hf download a/b --local-dir x": f"reached: '{python}/hf' download a/b --local-dir x",
        "gspo-hpc does not need accounting": None,  # words about the program, and commands that are whole
        f"{own} plan x": None,
        "/bin/gspo-hpc plan x": None,
        "uv pip install x; python -m pip install x; pip install x; trackio show": None,  # not of this environment
        "gspo-hpc planning": None,
    }.items():
        assert pasteable(text, "runs/my run") == (wanted or text)
    monkeypatch.setenv("PATH", f"{python}:/usr/bin:/bin")
    (python / "hf").chmod(0o700)
    text = "gspo-hpc logs runs/x; hf download a/b; gspo-hpc sync RUN"
    assert pasteable(text) == text


def test_all_commands_are_known() -> None:
    assert sorted(COMMANDS) == sorted(parser.COMMANDS)


def test_what_is_printed_can_be_pasted_where_path_has_no_program(tmp_path: Path) -> None:
    """Doctor, a refusal with hf, diagnose and the report, as a shell prints them whose environment is not activated."""
    bare = {**os.environ, "PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path)}

    def printed(*words: str) -> str:
        command = [sys.executable, "-m", "gspo_hpc", *words]
        done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    folder = Path(sys.executable).parent
    run, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "runs" / "half"), "max_steps": 10}}))
    with run.lock():
        begun = run.new_attempt(loader.load(run.config))
        begun.log_path(0).write_text("Traceback (most recent call last):\n  File x\nOSError: broken\n")
        begun.finish("failed", 1, "rank 0: OSError: broken")
    assert f"{folder}/gspo-hpc logs runs/half --errors" in printed("diagnose", "runs/half")
    printed("report", "runs/half", "--out", "x.html")
    assert f"{folder}/gspo-hpc logs {tmp_path}/runs/half --attempt 1" in (tmp_path / "x.html").read_text()
    broken = printed("doctor", str(ROOT / "configs" / "tiny_cpu.yaml"), "batch.global_batch_size=7")
    assert f"{folder}/gspo-hpc plan shows" in broken and "; gspo-hpc plan" not in broken
    trained = printed("train", "qwen2.5_7b_tp2", "cluster.platform=cpu", "cluster.nodes=2", "run.dir=x")
    assert f"use {folder}/gspo-hpc submit, or give cluster.nodes=1" in trained, trained
