"""Processes that graders start end with the process that ran the grader.

It takes about ten seconds. It would catch what a grader leaves behind that is killed after its time, crashes, or is
still at work at the end of a run; such processes would pile up on a node for as long as the run goes. It would also
catch a variable of Python's that a grader, and what it starts, would have only because it runs in a pool.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards import spawning, trial
from gspo_hpc.rewards.pool import RewardPool
from tests.unit.rewards.test_rewards import drain, is_alive

GRADERS = """
import os, subprocess, time

def starts(completion, *, prompt, fields):
    # A child, and a grandchild whose parent is gone.
    children = f"sleep 1000 & echo $! >> {fields['file']}; (sleep 1000 & echo $! >> {fields['file']})"
    subprocess.run(["sh", "-c", children], check=True)
    if fields["how"] == "hang":
        subprocess.run(["sleep", "1000"])
    if fields["how"] == "crash":
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def grader(tmp_path: Path) -> RewardFunction:
    path = tmp_path / "graders.py"
    path.write_text(GRADERS)
    return RewardFunction(function=f"{path}:starts")


def started(file: Path) -> list[int]:
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    return pids


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes of a grader live on without it"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_they_end_with_a_call_that_fails(grader: RewardFunction, tmp_path: Path, how: str) -> None:
    row = {"file": str(tmp_path / "pids"), "how": how}
    with RewardPool(Reward(functions=(grader,), workers=1, timeout=2.0)) as pool:
        pool.submit(0, "", 0, "", row)
        assert drain(pool)[0].failure is not None
        await_end(started(tmp_path / "pids"))
        pool.submit(1, "", 0, "", row | {"how": "fine", "file": os.devnull})
        assert drain(pool)[1].value == 1.0


def test_they_live_as_long_as_their_process_and_end_with_the_pool(grader: RewardFunction, tmp_path: Path) -> None:
    with RewardPool(Reward(functions=(grader,), workers=1, timeout=20.0)) as pool:
        pool.submit(0, "", 0, "", {"file": str(tmp_path / "pids"), "how": "fine"})
        assert drain(pool)[0].value == 1.0
        pids = started(tmp_path / "pids")
        assert all(is_alive(pid) for pid in pids)
    await_end(pids)


def test_they_end_with_a_trainer_that_is_killed(grader: RewardFunction, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, sys, signal\n"
        "from gspo_hpc.config.schema import Reward, RewardFunction\n"
        "from gspo_hpc.rewards.pool import RewardPool\n"
        "if __name__ == '__main__':\n"
        "    term = RewardFunction(function=sys.argv[1])\n"
        "    pool = RewardPool(Reward(functions=(term,), workers=1, timeout=20.0))\n"
        "    pool.submit(0, '', 0, '', {'file': sys.argv[2], 'how': 'fine'})\n"
        "    assert pool.poll(timeout=None)[0][1].value == 1.0\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, str(script), grader.function, str(tmp_path / "pids")]
    assert subprocess.run(words, env=env, timeout=60, check=False).returncode == -signal.SIGKILL
    await_end(started(tmp_path / "pids"))


def test_they_end_with_the_trial_before_a_run(grader: RewardFunction, tmp_path: Path) -> None:
    row = {"file": str(tmp_path / "pids"), "how": "hang"}
    (outcome,) = trial.run([grader], "", row, texts=("",), seconds=5.0)
    assert outcome.failure == "gave no answer within 5 s"
    await_end(started(tmp_path / "pids"))


def test_a_grader_has_no_variable_of_paths_that_this_process_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import os\n\ndef plain(completion, *, prompt, fields):\n    return 'PYTHONSAFEPATH' not in os.environ\n"
    )
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with RewardPool(Reward(functions=(RewardFunction(function=f"{path}:plain"),), workers=1, timeout=20.0)) as pool:
        pool.submit(0, "", 0, "", {})
        assert drain(pool)[0].value == 1.0


@pytest.mark.skipif(sys.flags.safe_path, reason="this process passes its own option on")
def test_processes_that_two_threads_start_at_once_both_leave_out_the_current_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one waits: it would else find the variable of the first, which takes it out once it has started."""
    second, first_started = threading.Event(), threading.Event()
    found: list[str | None] = []

    def start(number: int) -> None:
        if number == 0:
            second.wait(0.5)  # in vain
        else:
            second.set()
            first_started.wait(20)
        found.append(os.environ.get("PYTHONSAFEPATH"))

    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(start))
    context = spawning.context()
    other = threading.Timer(0.1, context.Process._Popen, (1,))
    other.start()
    context.Process._Popen(0)
    first_started.set()
    other.join()
    assert found == ["gspo-hpc"] * 2 and "PYTHONSAFEPATH" not in os.environ
