"""What killed processes leave on a node is found by its name and removed; what others have there stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gspo_hpc.system import leftovers

PROGRAM = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from gspo_hpc.system import leftovers

def child(mark, lock, made):
    leftovers.claim(mark)  # as the engines' processes do
    made.put(shared_memory.SharedMemory(create=True, size=16).name)
    time.sleep(60)

if __name__ == "__main__":
    leftovers.claim(sys.argv[1])
    with leftovers.temporary_folder(sys.argv[1]):
        context = multiprocessing.get_context("spawn")
        lock, made = context.Lock(), context.Queue()
        shared = shared_memory.SharedMemory(create=True, size=16)
        process = context.Process(target=child, args=(sys.argv[1], lock, made))
        process.start()
        made.get()
        tempfile.mkstemp()
        if sys.argv[2] == "killed":
            for pid in (process.pid, resource_tracker._resource_tracker._pid, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.join()
        shared.close()
        shared.unlink()
"""


def left(mark: str) -> list[Path]:
    """Files and folders that begin with the mark's tag."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for folder in folders for path in folder.iterdir() if leftovers._tag(mark) in path.name]


def start(mark: str, end: str, tmp_path: Path) -> int:
    """The exit code of a process that makes all kinds of things, and so does a child of it."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.run([sys.executable, str(program), mark, end], stderr=subprocess.DEVNULL).returncode


@pytest.fixture
def run_id() -> str:
    """One that nobody else on this machine has."""
    return f"test-{os.getpid()}-{os.urandom(4).hex()}"


def test_what_is_left_of_a_killed_attempt_goes_with_the_next(run_id: str, tmp_path: Path) -> None:
    assert start(f"{run_id}:1", "killed", tmp_path) == -signal.SIGKILL
    assert start(f"{run_id}:2", "killed", tmp_path) == -signal.SIGKILL
    kinds = {path.name.partition("g")[0] for path in left(f"{run_id}:1")}
    assert kinds == {"", "sem."} and len(left(f"{run_id}:1")) >= 4, left(f"{run_id}:1")
    leftovers.sweep(run_id, range(1, 2))
    assert left(f"{run_id}:1") == []
    assert len(left(f"{run_id}:2")) >= 4, "another attempt's"
    leftovers.sweep(run_id, [2])
    assert left(f"{run_id}:2") == []


def test_an_orderly_end_leaves_nothing(run_id: str, tmp_path: Path) -> None:
    assert start(f"{run_id}:1", "orderly", tmp_path) == 0
    for _ in range(500):  # the resource tracker ends a little later
        if not left(f"{run_id}:1"):
            return
        time.sleep(0.02)
    raise AssertionError(left(f"{run_id}:1"))
