"""Output of `export`, `eval` and `try`: their line, remarks and errors; libraries write into a log. Two seconds.

Catches a library's warning in front of a user's error, a log that is left behind, and a failure without its traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The worker with jobs of this script: the real ones take half a minute to import.
SCRIPT = """
import os, subprocess, sys, types, warnings
mode, *words = sys.argv[1:]

def job(*arguments):
    remark = arguments[-1]
    warnings.warn("a library warns")
    print("a library prints", flush=True)
    subprocess.run([sys.executable, "-c", "print('a child prints')"])
    if mode == "refused":
        raise ValueError("first line\\nsecond line")
    if mode == "failed":
        raise RuntimeError("it broke")
    remark("checkpoint 000020 is damaged")
    return "accuracy 1.0"

for name, function in (("export", "export"), ("evaluate", "evaluate"), ("try_out", "try_out")):
    module = types.ModuleType(name)
    setattr(module, function, job)
    sys.modules[f"gspo_hpc.training.jobs.{name}"] = module

from gspo_hpc.training import worker
sys.exit(worker.main(words))
"""


def run(folder: Path, mode: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(folder / "tmp")} | variables
    command = [sys.executable, "-c", SCRIPT, mode, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["export", "run", "--out", "o"], "wrote o\n"),
        (["eval", "run"], "accuracy 1.0\n"),
        (["try", "run", "--prompts", "1"], "accuracy 1.0\n"),
    ],
)
def test_only_the_line_and_remarks_are_printed(words: list[str], line: str, a_run: Path) -> None:
    done = run(a_run.parent, "done", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "checkpoint 000020 is damaged\n")
    log = (a_run / f"{words[0]}.log").read_text()
    assert all(f"a {who}" in log for who in ("library warns", "library prints", "child prints"))
    assert (a_run / f"{words[0]}.log").stat().st_mode & 0o777 == 0o600
    run(a_run.parent, "done", *words)
    assert (a_run / f"{words[0]}.log").read_text().count("a library prints") == 1, "a log is of one call"


def test_a_mistake_of_the_user_stands_alone(a_run: Path) -> None:
    done = run(a_run.parent, "refused", "eval", "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: first line\nerror: second line\n"
    config = a_run.parent / "c.yaml"
    config.write_text("")
    assert run(a_run.parent, "refused", "eval", "c.yaml").stderr == done.stderr
    assert not list((a_run.parent / "tmp").iterdir()), "a temporary log without a failure"


def test_a_failure_names_the_log_with_its_traceback(a_run: Path) -> None:
    done = run(a_run.parent, "failed", "eval", "c.yaml")
    first, second = done.stderr.splitlines()
    assert done.returncode == 1 and first == "error: RuntimeError: it broke"
    (log,) = (a_run.parent / "tmp").iterdir()
    assert second == f"error: {log} has the traceback, and what libraries wrote"
    assert "Traceback" in log.read_text() and "a library warns" in log.read_text()


def test_everything_is_shown_to_who_debugs(a_run: Path) -> None:
    done = run(a_run.parent, "refused", "eval", "run", GSPO_HPC_DEBUG="1")
    assert done.returncode == 2 and "Traceback" in done.stderr and "a library warns" in done.stderr
    assert "a library prints" in done.stdout and not (a_run / "eval.log").exists()
