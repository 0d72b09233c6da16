"""Ranks on the GPUs of one engine: one never answers, and the others end in time; they meet again; one is slow.

Costs half a minute: four times two processes, of which four import Megatron. Catches a limit of time that is not passed
on (the default group of the job has another one), an error that does not say who waited for whom, or that blames the
rank that waited, a second group of the same ranks that looks for the addresses of the first, and ranks that do not wait
for each other: a bucket that is posted before all have filled their memory, or memory that is filled while a worker
still reads it; and payloads of unequal lengths that come back padded.
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
    assert peers.gather(b"long" * rank) == [b"", b"long"]
    peers.wait()
    del peers
    drop_layout()
os._exit(0)
"""

# Two ranks send buckets, each of which fills half of their memory, to an engine with a worker for each of them. Rank 0
# owns the engine. Either rank 1 fills its memory late and workers read as soon as they are told of a bucket, or the
# owner is late, and workers read only when it waits for them.
SENDING = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from gspo_hpc.engine import weight_buffers
from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.exchange.peers import EnginePeers
from gspo_hpc.ops.weight_parts import Part

rank, path, slow = int(sys.argv[1]), sys.argv[2], int(float(sys.argv[3]))
half_a_minute = datetime.timedelta(seconds=30)
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=2, timeout=half_a_minute)
peers = EnginePeers(range(2), half_a_minute, dist.PrefixStore("peers", store))
peers.wait()  # both have imported everything
loaded, posted = [], []

class Engine:
    def begin(self): pass
    def check(self, part): pass
    def finish(self): pass
    def kill(self): os._exit(9)
    def post(self, bucket):
        posted.append(bucket)
        if slow == 1:
            self.wait_loaded()
    def wait_loaded(self):
        while posted:
            bucket = posted.pop()
            workers = [weight_buffers.map_buffer(address) for address in bucket["memory"]]
            for part in bucket["parts"]:
                values = (weight_buffers.view(one, part).tolist() for one in workers)
                loaded.append([part["name"], *(sorted(set(one)) for one in values)])

def stream(memory):
    for number in range(6):
        place = memory.allocate(1024).view(torch.float32)
        if rank == slow:
            time.sleep(0.2)
        place.fill_(10 * number + rank)
        yield [Part(f"w{number}", (256,), place)]

WeightSender("cpu", 2, 1024, peers).send(stream, Engine() if rank == 0 else None)
assert loaded == [[f"w{n}", [10 * n], [10 * n + 1]] for n in range(6)] * (rank == 0), loaded
os._exit(0)
"""


def start(program: str, rank: int, store: Path, limit: float) -> subprocess.Popen[str]:
    """Start one of the two ranks of a program."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(rank), str(store), str(limit)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended_well(program: str, store: Path, number: float) -> None:
    """Run both ranks of a program to their end."""
    both = [start(program, rank, store, number) for rank in (0, 1)]
    try:
        errors = [process.communicate(timeout=120)[1][-2000:] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], errors


def test_the_same_ranks_meet_again(tmp_path: Path) -> None:
    ended_well(AGAIN, tmp_path / "store", 30.0)


@pytest.mark.parametrize("slow", [0, 1], ids=["the owner and its engine are late", "the other rank is late"])
def test_ranks_wait_for_each_other_before_a_bucket_is_posted_and_filled_again(slow: int, tmp_path: Path) -> None:
    ended_well(SENDING, tmp_path / "store", slow)


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
