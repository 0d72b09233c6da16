"""The processes of an engine are the one that is started, its core and its workers, whatever else these start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gspo_hpc.engine.processes import Processes
from gspo_hpc.training.telemetry.collectives import NCCL_ENVIRONMENT

SCRIPT = """
import multiprocessing, os, subprocess, sys, time

def fork_and_sleep():
    os.fork()
    time.sleep(60)

if __name__ == "__main__":
    target, arguments = (fork_and_sleep, ()) if sys.argv[1] == "forks" else (time.sleep, (60,))
    worker = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    worker.start()
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(worker.pid, helper.pid, flush=True)
    time.sleep(60)
"""


def started(folder: Path, kind: str) -> tuple[Processes, int, list[int]]:
    """Return the processes, the first one's id, and the ids of a worker and of a helper that it has started."""
    (folder / "first.py").write_text(SCRIPT)
    processes, log = Processes(), folder / "log"
    processes.start([sys.executable, str(folder / "first.py"), kind], {}, log)
    assert wait_for(lambda: log.stat().st_size > 0)
    (first,) = processes.pids()
    return processes, first, [int(word) for word in log.read_text().split()]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_only_the_core_and_the_workers_count_as_the_engine(tmp_path: Path) -> None:
    """A process that a worker has started for a moment ends, and the engine lives on; but all of them are killed."""
    processes, first, (worker, helper) = started(tmp_path, "sleeps")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        processes.find()
        assert processes.pids() == [first, worker]
        os.kill(worker, 9)
        assert wait_for(lambda: processes.gone() == worker)
    finally:
        processes.kill()
        other_lives = other.poll() is None
        other.kill()
        other.wait()
    assert other_lives and processes.pids() == []
    assert wait_for(lambda: not psutil.pid_exists(helper))


def test_variables_of_the_trainers_own_groups_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's recorder and a single queue would slow an engine down; a rank's place would be taken for the engine's."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", *NCCL_ENVIRONMENT, "RANK", "MASTER_PORT", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "1")
    processes = Processes()
    processes.start([sys.executable, "-c", "import time; time.sleep(60)"], {"OMP_NUM_THREADS": "3"}, None)
    first = psutil.Process(processes.pids()[0])
    try:
        assert wait_for(lambda: bool(first.environ()))  # it has none while it begins
        environment = first.environ()
    finally:
        processes.kill()
    assert not {"CUDA_DEVICE_MAX_CONNECTIONS", *NCCL_ENVIRONMENT, "RANK", "MASTER_PORT"} & environment.keys()
    assert environment["NCCL_DEBUG"] == "1" and environment["OMP_NUM_THREADS"] == "3"


def test_the_end_of_a_helper_is_not_the_engines(tmp_path: Path) -> None:
    processes, first, (worker, helper) = started(tmp_path, "sleeps")
    try:
        processes.find()
        os.kill(helper, 9)
        assert wait_for(lambda: psutil.Process(helper).status() == psutil.STATUS_ZOMBIE)
        assert processes.gone() is None
        os.kill(first, 9)
        assert wait_for(lambda: processes.gone() == first)
    finally:
        processes.kill()


def test_a_fork_of_a_worker_is_no_worker(tmp_path: Path) -> None:
    """It becomes something else in a moment, or ends."""
    processes, first, (worker, _) = started(tmp_path, "forks")
    try:
        assert wait_for(lambda: bool(psutil.Process(worker).children()))
        processes.find()
        assert processes.pids() == [first, worker]
    finally:
        processes.kill()
