"""Run one of the cases of this folder on several real ranks: processes, gloo, Megatron's groups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(case: str, world: int, folder: Path, timeout: float = 240.0, **arguments: Any) -> dict[str, np.ndarray]:
    """Rank 0's arrays from function `case` of cases.py, run on `world` ranks."""
    out = folder / f"{case}-{world}-{abs(hash(json.dumps(arguments, sort_keys=True))) % 10**8}.npz"
    port = str(free_port())
    processes = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.gloo.cases", case, str(out), json.dumps(arguments)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    texts = []
    try:
        for process in processes:
            texts.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    failed = [
        f"rank {r} exit {p.returncode}:\n{t[-4000:]}" for r, (p, t) in enumerate(zip(processes, texts)) if p.returncode
    ]
    assert not failed, "\n".join(failed)
    with np.load(out) as arrays:
        return dict(arrays)
