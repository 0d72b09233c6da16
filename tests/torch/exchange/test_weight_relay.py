"""Weights that the owner of an engine has kept, on their way to the other ranks on its GPUs.

It takes ten seconds: two processes that import torch. It would catch a deadlock of the two: the ranks of an engine meet
whenever half of the memory is full, and must not wait for each other's broadcast there. And it would catch kept weights
that the next bucket overwrites, or for which it waits although it lies elsewhere, and a bucket on a GPU that is used
while it is still on its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.weight_broadcast import SentMemory, WeightBroadcast, entry_of
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.ops.weight_parts import Part, Scratch

RANK = """
import datetime, os, sys
import torch, torch.distributed as dist
from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.exchange.peers import EnginePeers
from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.weight_broadcast import WeightBroadcast, entry_of
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
            kept.leave(memory[:size])
            place = memory[:size].fill_(value)
            kept.add([entry_of(Part(f"w{value}", (size,), place), place)], place)
        kept.finish()
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


class Scripted(WeightBroadcast):
    """A receiver's end, whose buckets come from a list: bucket n is full of n."""

    def __init__(self, sizes: list[int], at: Callable[[int], object]) -> None:
        buckets: list[dict[str, Any]] = [{"bytes": size, "parts": []} for size in sizes]
        self._messages, self._number, self._at = iter([{"largest": max(sizes)}, *buckets, {}]), 0, at

    def _hear(self) -> dict[str, Any]:
        return next(self._messages)

    def broadcast(self, place: torch.Tensor) -> None:
        place.fill_(self._number)
        self._at(self._number)
        self._number += 1


class Halves(Scratch):
    """Memory whose halves are handed out in turns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._turn = 0

    def allocate(self, size: int) -> torch.Tensor:
        self._turn += size > 0
        return super().allocate(128)[64 * (self._turn % 2) :][:size]


def test_the_next_bucket_comes_while_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy begins when the second bucket is there; made in sequence, the two would wait for each other."""
    second = threading.Event()
    empty = HostMemory.empty

    def room(memory: HostMemory, *arguments: Any, **options: Any) -> torch.Tensor:
        assert second.wait(30), "the second bucket waits for the copy of the first"
        return empty(memory, *arguments, **options)

    monkeypatch.setattr(HostMemory, "empty", room)
    kept, broadcast = KeptWeights(), Scripted([64, 64], lambda number: number == 1 and second.set())
    kept.begin()
    assert len(list(broadcast.stream(Halves(), kept))) == 2
    assert [set(copy.tolist()) for _, copy in kept._buckets] == [{0}, {1}]


def test_no_bucket_overwrites_one_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy gives the third bucket, which is to lie in the same half, the time to overwrite what it copies."""
    third, empty = threading.Event(), HostMemory.empty

    def room(memory: HostMemory, *arguments: Any, **options: Any) -> torch.Tensor:
        third.wait(0.2)
        return empty(memory, *arguments, **options)

    monkeypatch.setattr(HostMemory, "empty", room)
    kept, broadcast = KeptWeights(), Scripted([64, 64, 64], lambda number: number == 2 and third.set())
    kept.begin()
    list(broadcast.stream(Halves(), kept))
    assert [set(copy.tolist()) for _, copy in kept._buckets] == [{0}, {1}, {2}]


def test_a_copy_that_failed_is_not_kept_for_one_that_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may refuse to lock the memory: the rank fails in this sync, and not when its engine dies one day."""

    def room(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA did not lock 1 GiB")

    monkeypatch.setattr(HostMemory, "empty", room)
    kept = KeptWeights()
    kept.begin()
    with pytest.raises(RuntimeError, match="did not lock"):
        list(Scripted([64], lambda number: None).stream(Halves(), kept))


def test_what_was_copied_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that kept the place a little longer would keep memory of a GPU, which the engine needs."""
    asked, empty, found = threading.Event(), HostMemory.empty, list[object]()

    def room(memory: HostMemory, *arguments: Any, **options: Any) -> torch.Tensor:
        assert asked.wait(30)
        return empty(memory, *arguments, **options)

    monkeypatch.setattr(HostMemory, "empty", room)
    kept, place = KeptWeights(), torch.zeros(64, dtype=torch.uint8)
    seen = weakref.ref(place)
    kept.begin()
    kept.add([], place)
    del place
    (_, _, copied) = kept._under_way[0]
    copied.add_done_callback(lambda future: found.append(seen()))  # the first moment at which anybody can know
    asked.set()
    kept.finish()
    assert found == [None]


def test_a_bucket_is_gathered_only_where_nothing_is_being_sent() -> None:
    """One half is sent while the other is filled; a bucket larger than a half takes both, and waits for both."""
    waited: list[str] = []
    memory = SentMemory(torch.device("cpu"), 64, cast(Any, SimpleNamespace(announce=lambda largest: None)))
    memory.reserve(160)
    expected = {"a": [], "b": [], "c": ["a"], "large": ["b", "c"], "d": ["large"], "e": []}
    for name, before in expected.items():
        place = memory.allocate(160 if name == "large" else 64)
        assert waited == before, name
        waited.clear()
        memory.occupy(cast(Any, SimpleNamespace(wait=lambda name=name: waited.append(name))))
        del place
    memory.release()
    assert waited == ["d", "e"] and memory._bytes.numel() == 0
