"""Hangs while a background save runs, in real ranks that talk over gloo and report to a real watcher.

Catches a main thread that hangs unseen while the saver's thread sends and receives, a main thread that counts as hung
while it waits for a save that goes on, and a save that stands still for ever. Takes a minute.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gspo_hpc.config import loader
from gspo_hpc.launch import watch
from gspo_hpc.system.control import Server

LIMIT = 4.0  # faults.hang_timeout

RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from gspo_hpc.checkpoint import saver
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.system import direct_io
from gspo_hpc.system.control import Client
from gspo_hpc.system.progress import mark

host, token, rank, store, folder, mode = sys.argv[1:]
rank, folder = int(rank), Path(folder)
client = Client(host, token, rank, 2, node="n", on_stop=lambda reason: None, signal_name=lambda: None)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def prepare(policy, staging, group, *more, **options):
    def write():
        if mode == "exchanging":
            time.sleep(60) if rank else Transport(group).tree_all_reduce(b"x", b"".join)
        end = time.monotonic() + 10.0
        if mode == "standing":
            time.sleep(60)
        if mode == "slow disk" and rank:  # the other rank waits meanwhile in the collectives of the save
            with direct_io.Writer(staging / "shard") as shard:
                while time.monotonic() < end:
                    shard.write(bytes(direct_io.BUFFER))
                    time.sleep(0.1)
        rounds = {"hanging": 10**6, "sending": 150}.get(mode, 0)  # as many on both ranks, which wait for each other
        for _ in range(rounds):
            Transport(group).tree_all_reduce(b"x", b"".join)
            time.sleep(0.05)
        return {}
    return write

saver.sharded.prepare = prepare
ranks = SimpleNamespace(rank=rank, timeout=timedelta(seconds=60), device=torch.device("cpu"))
one = saver.Saver(SimpleNamespace(ranks=ranks))
mark("save")
one.save(folder, lambda known: None)
if mode == "hanging":
    mark("update")
    time.sleep(60)
one.wait()
mark("after")
client.finish("done")
"""


@pytest.mark.parametrize("mode", ["hanging", "exchanging", "sending", "slow disk", "standing"])
def test_hangs_beside_a_save(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("staging")
    meeting = tmp_path_factory.mktemp("store") / "file"
    server = Server("127.0.0.1", 2)
    config = loader.from_dict({"cluster": {"gpus_per_node": 2}, "faults": {"hang_timeout": LIMIT}})
    assert config.world_size == 2
    places = [str(rank) for rank in range(2)]
    command = [sys.executable, "-c", RANK, *server.environment().values()]
    ranks = [subprocess.Popen([*command, place, str(meeting), str(folder), mode]) for place in places]
    try:
        while len(server.ranks) < 2 or any(one.phase == "started" for one in server.ranks.values()):
            server.poll(0.1)
        began, found = time.monotonic(), None
        while found is None and not all(one.outcome for one in server.ranks.values()):
            server.poll(0.1)
            found = watch.problem(server.ranks, config, time.monotonic(), began, str)
            assert time.monotonic() - began < 15 * LIMIT, "a hang was not found"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.close()
    if mode == "hanging":
        assert found is not None and "hangs in 'update' for 4 s (faults.hang_timeout)" in found
    elif mode in ("standing", "exchanging"):  # for the pieces of a rank whose thread stands still, for one
        assert found is not None and "hangs in 'save' for 4 s (faults.hang_timeout)" in found
    else:
        assert found is None and all(one.outcome == "done" for one in server.ranks.values())
