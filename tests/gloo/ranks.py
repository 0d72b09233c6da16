"""Run one of the cases of this folder on several real ranks: processes, gloo, Megatron's groups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_hpc.system.environment import STORE


class Meeting:
    """A meeting place for the ranks of one job: a port that is never free for others, as rank 0 inherits the socket."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._store = socket.create_server(("127.0.0.1", 0), backlog=world)

    def options(self, rank: int) -> dict[str, Any]:
        """Return what subprocess.Popen needs to start a rank."""
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if rank:
            return {"env": os.environ | place}
        store = self._store.fileno()
        return {"env": os.environ | place | {STORE: str(store)}, "pass_fds": (store,)}

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


Case = tuple[str, dict[str, Any]]


CASES = ("tests.gloo.cases",)


def run(
    world: int, folder: Path, cases: dict[str, Case], timeout: float = 3600.0, module: Sequence[str] = CASES
) -> dict[str, dict[str, np.ndarray]]:
    """Rank 0's arrays of every case, by its key; all cases in turn on one set of `world` ranks.

    `module` runs them: its name, and what it takes before the file of cases.
    """
    outs = {key: folder / f"{key}.npz" for key in cases}
    work = folder / f"work-{world}.json"
    work.write_text(json.dumps([[str(outs[key]), *case] for key, case in cases.items()]))
    logs = [folder / f"rank-{rank}-of-{world}.log" for rank in range(world)]
    processes = []
    command = [sys.executable, "-m", *module, str(work)]
    with Meeting(world) as meeting:
        for rank in range(world):
            with logs[rank].open("wb") as output:
                processes.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **meeting.options(rank))
                )
    deadline = time.monotonic() + timeout
    try:
        # One rank that failed leaves the others waiting: do not wait with them.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < deadline, f"ranks still run after {timeout} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            late = time.monotonic() >= deadline
            process.kill() if late or any(p.returncode for p in processes) else process.wait()
    failed = [f"rank {r}:\n{logs[r].read_text()[-4000:]}" for r, p in enumerate(processes) if p.wait() not in (0, -9)]
    assert not failed, "\n".join(failed)
    return {key: dict(np.load(out)) for key, out in outs.items()}
