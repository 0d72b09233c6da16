"""The processes of an engine are its core and its workers, whatever else these start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

import psutil

from gspo_hpc.engine.processes import Processes


def test_only_the_core_and_the_workers_count_as_the_engine() -> None:
    """A process that a worker has started for a moment ends, and the engine lives on; but all of them are killed."""
    processes = Processes()
    with processes.starting({}, None):
        worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=dict(os.environ))
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=dict(os.environ))
    try:
        processes.find()
        assert processes.pids() == [worker.pid]
        helper.kill()
        helper.wait()
        assert processes.gone() is None
        worker.kill()
        worker.join()
        assert processes.gone() == worker.pid
    finally:
        processes.kill()
    other.wait(10)
    assert processes.pids() == []


def fork_and_sleep() -> None:
    os.fork()
    time.sleep(60)


def test_a_fork_of_a_worker_is_no_worker() -> None:
    """It becomes something else in a moment, or ends."""
    processes = Processes()
    with processes.starting({}, None):
        worker = multiprocessing.get_context("spawn").Process(target=fork_and_sleep, daemon=True)
        worker.start()
    assert worker.pid is not None
    try:
        deadline = time.monotonic() + 60
        while not psutil.Process(worker.pid).children() and time.monotonic() < deadline:
            time.sleep(0.05)
        processes.find()
        assert processes.pids() == [worker.pid]
    finally:
        processes.kill()
