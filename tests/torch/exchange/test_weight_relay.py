"""Weights that the owner of an engine has kept, on their way to the other ranks on its GPUs.

It takes ten seconds: two processes that import torch. It would catch a deadlock of the two: the ranks of an engine meet
whenever half of the memory is full, and must not wait for each other's broadcast there. And it would catch kept weights
that the next bucket overwrites, and a bucket on a GPU that is used while it is still on its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.exchange.weight_broadcast import KeptWeights, WeightBroadcast, entry_of
from gspo_hpc.ops.weight_parts import Part, Scratch

RANK = """
import datetime, os, sys
import torch, torch.distributed as dist
from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.exchange.peers import EnginePeers
from gspo_hpc.exchange.weight_broadcast import KeptWeights, WeightBroadcast, entry_of
from gspo_hpc.ops.weight_parts import Part

rank, path = int(sys.argv[1]), sys.argv[2]
limit = datetime.timedelta(seconds=30)
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=2, timeout=limit)
relay = WeightBroadcast(dist.PrefixStore("relay", store), rank, 2, "gloo", limit)
sender = WeightSender("cpu", 2, 1 << 20, EnginePeers(range(2), limit, dist.PrefixStore("peers", store)))
kept, seen = KeptWeights(), []
kept.begin()
for number in range(4 if rank == 0 else 0):  # each as large as half of the memory
    weight = torch.full((1 << 18,), float(number))
    bytes_ = weight.view(torch.uint8)
    kept.add([entry_of(Part(f"w{number}", (1 << 18,), weight), bytes_)], bytes_)

def stream(memory):
    for parts in kept.stream(memory, relay) if rank == 0 else relay.stream(memory):
        seen.extend((part.name, float(part.tensor.mean())) for part in parts)
        yield parts
        del parts

sender.send(stream)
assert seen == [(f"w{number}", float(number)) for number in range(4)], seen
os._exit(0)  # as every rank of a run ends: Python's own exit can meet threads of gloo that still run, and abort
"""


def test_ranks_of_an_engine_get_more_than_half_of_the_memory(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path / "store")],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1][-2000:] for rank in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail("the two wait for each other")
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_kept_weights_are_copies() -> None:
    """Buckets that follow each other in the same memory are kept; the next weights take the place of the last."""
    kept, memory, again = KeptWeights(), torch.empty(64, dtype=torch.uint8), Scratch(torch.device("cpu"))
    for first in (1, 11):
        kept.begin()
        for value, size in ((first, 64), (first + 1, 32)):
            place = memory[:size].fill_(value)
            kept.add([entry_of(Part(f"w{value}", (size,), place), place)], place)
        memory.fill_(0)
        found = [(part.name, set(part.tensor.tolist())) for parts in kept.stream(again) for part in parts]
        assert found == [(f"w{first}", {first}), (f"w{first + 1}", {first + 1})]


def test_a_bucket_on_a_gpu_is_there_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's handle makes the stream wait, and not the host: a worker of an engine has a stream of its own."""
    events: list[str] = []
    work = SimpleNamespace(wait=lambda: events.append("the stream waits"))
    stream = SimpleNamespace(synchronize=lambda: events.append("the host waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    made = WeightBroadcast.__new__(WeightBroadcast)
    made._bulk = SimpleNamespace(broadcast=lambda places, options: events.append("broadcast") or work)
    for on_gpu in (True, False):
        place: Any = SimpleNamespace(is_cuda=on_gpu)
        made.broadcast(place)
        assert events == ["broadcast", "the stream waits", *(["the host waits"] if on_gpu else [])]
        events.clear()
