"""A worker of vLLM that maps a rank's GPU memory finds there what the rank has put into it, however late its stream is.

It costs nothing. The stream is imitated strictly: what a rank writes is in memory once somebody has waited for the
stream, and a worker reads as soon as it is told. Catches an address that is told while copies are under way, which
other tests miss because a CPU writes at once, memory that no other process can map, and memory that is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.engine import compat, weight_buffers
from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.ops.weight_parts import Memory, Part

HALF = 1024  # bytes


class Gpu:
    """A GPU's stream, torch's exports of its memory, and a worker that maps them; it notes the order of events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.found: dict[str, torch.Tensor] = {}
        self._queue: list[Callable[[], Any]] = []
        self._exported: dict[str, torch.Tensor] = {}
        stream = SimpleNamespace(synchronize=self._synchronize)
        self._ordinary = False  # what is allocated can be exported

        def empty(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
            assert self._ordinary and device == "cuda", "in an expandable segment, which no other process can map"
            return torch.empty(size, dtype=dtype)

        @contextlib.contextmanager
        def ordinary() -> Iterator[None]:
            self._ordinary = True
            yield
            self._ordinary = False

        monkeypatch.setattr(weight_buffers, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))
        monkeypatch.setattr(compat, "ordinary_segments", ordinary)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: self.events.append("collect"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("empty cache"))
        monkeypatch.setattr(compat, "export_memory", self._export)
        monkeypatch.setattr(compat, "release_ipc_counter", lambda *_: self.events.append("release"))

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Have the GPU do something, later."""
        self._queue.append(kernel)

    def _synchronize(self) -> None:
        self.events.append("synchronize")
        for kernel in self._queue:
            kernel()
        self._queue.clear()

    def _export(self, memory: torch.Tensor) -> dict[str, Any]:
        self.events.append("export")
        handle = f"{len(self._exported):02x}"
        self._exported[handle] = memory
        return {"handle": handle, "counter": "00", "counter_offset": 0}

    def post(self, bucket: dict[str, Any]) -> None:
        """Load a bucket at once."""
        self.events.append("post")
        memory = self._exported[bucket["memory"][0]["handle"]]
        for part in bucket["parts"]:
            self.found[part["name"]] = weight_buffers.view(memory, part).clone()

    def wait_loaded(self) -> None:
        """Do nothing: everything is loaded at once."""

    def begin(self) -> None:
        """Do nothing."""

    def check(self, part: Part) -> None:
        """Do nothing."""

    finish = kill = begin


@pytest.mark.parametrize(
    ("sizes", "buckets"), [([40], 1), ([200, 40, 60, 200], 3), ([200, 200, 900, 200, 200], 5)], ids=str
)
def test_workers_are_told_of_memory_once_the_stream_has_filled_it(
    sizes: list[int], buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of both halves, of several tensors, and one of a tensor for which the memory grows."""
    gpu, sent = Gpu(monkeypatch), {f"w{number}": torch.randn(size) for number, size in enumerate(sizes)}

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for name, tensor in sent.items():
            place = memory.allocate(tensor.nbytes).view(torch.float32)
            gpu.launch(lambda place=place, tensor=tensor: place.copy_(tensor))
            yield [Part(name, tuple(tensor.shape), place)]

    sender = WeightSender("cuda", 1, HALF)
    sender.send(stream, gpu)
    assert gpu.found.keys() == sent.keys()
    assert [name for name, tensor in sent.items() if not torch.equal(gpu.found[name], tensor)] == []
    told = [place for place, event in enumerate(gpu.events) if event in ("export", "post")]
    first = ["synchronize", "export", "post"]
    assert gpu.events[:3] == first and gpu.events.count("post") == buckets
    assert all("synchronize" in gpu.events[max(0, place - 2) : place] for place in told), gpu.events
    assert gpu.events[-2:] == ["collect", "empty cache"], "before the engine computes, which needs this memory"
    assert "release" not in gpu.events, "the worker has unmapped everything itself"
    sender.close()
