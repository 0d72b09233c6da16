"""Ranks on the GPUs of one engine: one never answers, and the others end in time; or they meet a second time.

Costs twenty seconds: twice two processes that import Megatron. Catches a limit of time that is not passed on (the
default group of the job has another one), an error that does not say who waited for whom, or that blames the rank that
waited, and a second group of the same ranks that looks for the addresses of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.launch.failures import AFTERMATH

LIMIT = 2.0  # seconds; of every other group: half an hour

# Rank 1 makes the group, says nothing in it, and never comes to make the next one.
PROGRAM = """
import datetime, json, os, sys, time
import torch.distributed as dist
from gspo_hpc.config.loader import from_dict
from gspo_hpc.exchange.peers import engine_peers
from gspo_hpc.policy.process_groups import store

rank, path, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
half_an_hour = datetime.timedelta(minutes=30)
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=half_an_hour)
config = from_dict({"cluster": {"gpus_per_node": 2}, "rollout": {"tensor_parallel_size": 2}})
timeout = datetime.timedelta(seconds=limit)
job = config, rank, rank, timeout, store
peers = engine_peers(*job)
if rank == 1:
    time.sleep(600)
for wait in (lambda: peers.gather(b"x"), peers.wait, lambda: engine_peers(*job)):
    begin, said = time.monotonic(), ""
    try:
        wait()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([time.monotonic() - begin, said]), flush=True)
os._exit(0)
"""

# Both ranks make a group three times, and rank 0 is late from the second time on.
AGAIN = """
import datetime, os, sys, time
import torch.distributed as dist
from gspo_hpc.exchange.peers import EnginePeers
from gspo_hpc.policy.process_groups import drop_layout
from gspo_hpc.policy.process_groups import store as job_store

rank, store = int(sys.argv[1]), sys.argv[2]
half_an_hour = datetime.timedelta(minutes=30)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=half_an_hour)
for meeting in range(3):
    time.sleep(1.0 if meeting and rank == 0 else 0.0)
    peers = EnginePeers([0, 1], datetime.timedelta(seconds=float(sys.argv[3])), job_store())
    assert peers.gather(bytes([meeting, rank])) == [bytes([meeting, 0]), bytes([meeting, 1])]
    peers.wait()
    del peers
    drop_layout()
os._exit(0)
"""


def start(program: str, rank: int, store: Path, limit: float) -> subprocess.Popen[str]:
    """Start one of the two ranks of a program."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(rank), str(store), str(limit)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_same_ranks_meet_again(tmp_path: Path) -> None:
    both = [start(AGAIN, rank, tmp_path / "store", 30.0) for rank in (0, 1)]
    try:
        errors = [process.communicate(timeout=120)[1][-2000:] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], errors


def test_a_peer_that_never_answers_ends_the_wait(tmp_path: Path) -> None:
    silent, waiting = (start(PROGRAM, rank, tmp_path / "store", LIMIT) for rank in (1, 0))
    try:
        out, err = waiting.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        pytest.fail(f"a rank still waits for its peer after 90 s; the limit is {LIMIT} s")
    finally:
        for process in (silent, waiting):
            process.kill()
            process.communicate()
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == 3, err[-2000:]
    seconds, errors = zip(*found, strict=True)
    assert seconds[0] >= 0.9 * LIMIT and max(seconds) < LIMIT + 10, found
    for error in errors:
        assert "ranks 0 to 1, which share the GPUs of an engine" in error and "2 s" in error, error
        assert "\n" not in error and AFTERMATH.search(error), "the rank that waited is not the one to blame"
