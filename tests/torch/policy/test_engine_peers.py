"""Ranks on the GPUs of one engine, one of which never answers: the others end in time, and say what happened.

Costs ten seconds: two processes that import Megatron. Catches a limit of time that is not passed on (the default group
of the job has another one), and an error that does not say who waited for whom, or that blames the rank that waited.
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
import torch, torch.distributed as dist
from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy.process_groups import Ranks, engine_peers

rank, store, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
half_an_hour = datetime.timedelta(minutes=30)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=half_an_hour)
config = from_dict({"cluster": {"gpus_per_node": 2}, "rollout": {"tensor_parallel_size": 2}})
timeout = datetime.timedelta(seconds=limit)
place = Ranks(rank, 2, rank, torch.device("cpu"), rank, 2, 0, 1, 0, 1, 0, 1, 1, timeout)
peers = engine_peers(config, place)
if rank == 1:
    time.sleep(600)
for wait in (lambda: peers.gather(b"x"), peers.wait, lambda: engine_peers(config, place)):
    begin, said = time.monotonic(), ""
    try:
        wait()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([time.monotonic() - begin, said]), flush=True)
os._exit(0)
"""


def test_a_peer_that_never_answers_ends_the_wait(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), str(tmp_path / "store"), str(LIMIT)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    silent, waiting = start(1), start(0)
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
