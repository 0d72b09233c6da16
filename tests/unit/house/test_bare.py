"""The user's side works where neither the training libraries nor submitit can be imported."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.runs.directory import RunDir, open_run

TRAINING = ("torch", "vllm", "megatron", "wandb", "transformers")
SUBMITS = {
    "gspo_hpc.launch.slurm.array",
    "gspo_hpc.launch.slurm.batch_step",
    "gspo_hpc.launch.slurm.compat",
    "gspo_hpc.launch.slurm.evaluation",
    "gspo_hpc.launch.slurm.serve",
    "gspo_hpc.launch.slurm.submit",
    "gspo_hpc.doctor.nodes",
}

# An interpreter in which to import one of these packages raises, also where they are installed.
HOOK = """
import importlib, importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden by a test)", name=name.partition(".")[0])

sys.meta_path.insert(0, Absent())
"""


def python(code: str, *words: str, absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter without these packages."""
    command = [sys.executable, "-c", HOOK.format(absent=absent) + code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def user_side(project: Path) -> list[str]:
    """Return the names of all modules of the rooms that the contract of the user's side lists."""
    parser = configparser.ConfigParser()
    parser.read(project / "setup.cfg", encoding="utf-8")
    rooms = parser["importlinter:contract:user_side"]["source_modules"].split()
    files = [path for room in rooms for path in sorted((project / room.replace(".", "/")).rglob("*.py"))]
    return [".".join(path.relative_to(project).with_suffix("").parts).removesuffix(".__init__") for path in files]


def test_every_module_imports_without_the_training_libraries_and_all_but_those_that_submit_without_submitit(
    project: Path,
) -> None:
    code = """
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name
print(json.dumps(failed))
"""
    names = user_side(project)
    assert {"gspo_hpc.cli.main", "gspo_hpc.system.files", "gspo_hpc.launch.status", *SUBMITS} <= set(names)
    done = python(code, *names, absent=(*TRAINING, "submitit"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(SUBMITS, "submitit")


def test_the_hook_hides_an_installed_package() -> None:
    done = python("import wandb", absent=TRAINING)
    assert done.returncode == 1 and "No module named 'wandb' (hidden by a test)" in done.stderr


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that failed once, with metrics and logs."""
    made, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "run"), "max_steps": 10}}))
    with made.lock():
        attempt = made.new_attempt(loader.load(made.config))
        attempt.log_path(0).write_text("Traceback (most recent call last):\n  f()\nZeroDivisionError: the cause\n")
        attempt.finish("failed", 1, "rank 0 on n1: ZeroDivisionError: the cause")
    for step in range(4):
        made.append_metrics({"step": step, "reward": 0.5, "seconds": 2.0, "completion_tokens_per_s": 100.0})
    return made


MAIN = "from gspo_hpc.cli.main import main\nsys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (("status", "RUN"), 0, "failed (rank 0 on n1: ZeroDivisionError: the cause)"),
        (("status", "RUN", "--json"), 0, '"state": "failed"'),
        (("logs", "RUN"), 0, "ZeroDivisionError: the cause"),
        (("logs", "RUN", "--errors"), 0, "ZeroDivisionError: the cause"),
        (("diagnose", "RUN"), 1, "ZeroDivisionError: the cause"),
        (("diagnose", "RUN", "--json"), 1, '"problem"'),
    ],
)
def test_commands_that_only_read_a_run(run: RunDir, words: tuple[str, ...], code: int, shown: str) -> None:
    given = [str(run.path) if word == "RUN" else word for word in words]
    done = python(MAIN, *given, absent=(*TRAINING, "submitit"))
    assert (done.returncode, done.stderr) == (code, "")
    assert shown in " ".join(done.stdout.split())


@pytest.fixture
def holder(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the run until it is asked to stop."""
    code = (
        "import signal, sys; from gspo_hpc.runs.directory import RunDir\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "with RunDir(sys.argv[1]).lock():\n"
        "    print('held', flush=True); signal.sigwait([signal.SIGTERM])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_cancel(run: RunDir, holder: subprocess.Popen[str]) -> None:
    done = python(MAIN, "cancel", str(run.path), absent=(*TRAINING, "submitit"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"process {holder.pid} stops at its next safe point and saves" in done.stdout
    assert holder.wait(20) == 0
