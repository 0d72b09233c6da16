"""Weights on their way from the ranks that train to those that generate, on GPUs or nodes of their own.

All training ranks gather the weights; the first of them broadcasts each bucket from where it was gathered into memory
of the receivers, from which their engines load it. Before a bucket comes what is in it, as JSON in host memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.ops.weight_parts import Memory, Part, Scratch

Entry = dict[str, Any]  # what a receiver must know of a part: plain values


class WeightBroadcast:
    """One member of a group: number 0 sends, the others receive. All make one, and its calls are collective."""

    def __init__(self, store: dist.Store, member: int, members: int, backend: str, timeout: datetime.timedelta) -> None:
        """Meet the others in a store that no other group uses, which takes until the last has come.

        Buckets travel by `backend`: "nccl" between GPUs, "gloo" between hosts. `timeout` is the longest wait for each.
        """
        self._host: Any = dist.ProcessGroupGloo(dist.PrefixStore("host", store), member, members, timeout)
        self._bulk: Any = self._host
        if backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL  # torch's stubs do not know that it takes a timeout
            self._bulk = nccl(dist.PrefixStore("nccl", store), member, members, timeout)

    def send(self, buckets: Iterable[Sequence[Part]], memory: SentMemory) -> None:
        """Send all buckets, whose parts lie in the newest place of `memory`."""
        for parts in buckets:
            place = memory.newest
            assert place is not None
            self.send_bucket([entry_of(part, place) for part in parts], place)
        self.end()

    def send_bucket(self, entries: list[Entry], place: torch.Tensor) -> None:
        """Send one bucket."""
        self.announce_bucket(entries, place)
        self.broadcast(place)

    def announce_bucket(self, entries: list[Entry], place: torch.Tensor) -> None:
        """Tell the receivers what is in the bucket that comes next, so that they take memory for it."""
        self._tell({"bytes": place.numel(), "parts": entries})

    def end(self) -> None:
        """Tell the receivers that no bucket follows."""
        self._tell({})

    def stream(self, memory: Memory, keep: KeptWeights | None = None) -> Iterator[Sequence[Part]]:
        """Yield the parts that are sent, in `memory`, to the last one; `keep` gets a copy of all."""
        while message := self._hear():
            if "largest" in message:
                memory.reserve(int(message["largest"]))
                continue
            place = memory.allocate(int(message["bytes"]))
            self.broadcast(place)
            if keep is not None:
                keep.add(message["parts"], place)
            parts = [part_of(entry, place) for entry in message["parts"]]
            del place  # else it would keep this memory, if it has to be freed for larger parts
            yield parts
            del parts

    def announce(self, largest: int) -> None:
        """Tell the receivers the size of the largest bucket."""
        self._tell({"largest": largest})

    def broadcast(self, place: torch.Tensor) -> None:
        """Send the bucket that was announced, or receive it into `place`."""
        self._bulk.broadcast([place], dist.BroadcastOptions()).wait()
        if place.is_cuda:
            torch.cuda.current_stream().synchronize()  # the sender overwrites it, and workers of an engine read it

    def _tell(self, message: dict[str, Any]) -> None:
        payload = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._host.broadcast([torch.tensor([payload.numel()])], dist.BroadcastOptions()).wait()
        self._host.broadcast([payload], dist.BroadcastOptions()).wait()

    def _hear(self) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        self._host.broadcast([size], dist.BroadcastOptions()).wait()
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._host.broadcast([payload], dist.BroadcastOptions()).wait()
        message: dict[str, Any] = json.loads(payload.numpy().tobytes())
        return message


class SentMemory(Scratch):
    """Memory of the sender, which knows where the newest parts lie."""

    def __init__(self, device: torch.device, broadcast: WeightBroadcast | None) -> None:
        """`broadcast`: None on a rank that only takes part in gathering."""
        super().__init__(device)
        self._broadcast = broadcast
        self.newest: torch.Tensor | None = None

    def reserve(self, largest: int) -> None:
        """See Memory."""
        super().reserve(largest)
        if self._broadcast is not None:
            self._broadcast.announce(largest)

    def allocate(self, size: int) -> torch.Tensor:
        """See Memory."""
        self.newest = super().allocate(size)
        return self.newest


class KeptWeights:
    """A copy of the newest weights in host memory, from which an engine that was started again is filled.

    It is page-locked where weights come from a GPU: the next bucket waits until the one before is copied.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._buckets: list[tuple[list[Entry], torch.Tensor]] = []
        self._filled = 0

    def begin(self) -> None:
        """Expect all weights; their memory is that of the ones before."""
        self._filled = 0

    def add(self, entries: list[Entry], place: torch.Tensor) -> None:
        """Keep the parts of one bucket."""
        if self._filled == len(self._buckets) or self._buckets[self._filled][1].numel() != place.numel():
            del self._buckets[self._filled :]
            self._buckets.append((entries, self._memory.empty(place.shape, torch.uint8, locked=place.is_cuda)))
        _, copy = self._buckets[self._filled]
        self._buckets[self._filled] = entries, copy.copy_(place)  # a copy that the host waits for
        self._filled += 1

    def stream(self, memory: Memory, relay: WeightBroadcast | None = None) -> Iterator[Sequence[Part]]:
        """Yield all parts, in `memory`; `relay` takes them to ranks that keep none."""
        largest = max((copy.numel() for _, copy in self._buckets[: self._filled]), default=0)
        memory.reserve(largest)
        if relay is not None:
            relay.announce(largest)
        for entries, copy in self._buckets[: self._filled]:
            if relay is not None:
                relay.announce_bucket(entries, copy)
            place = memory.allocate(copy.numel()).copy_(copy)  # the ranks of an engine meet in it, the others as well
            if relay is not None:
                relay.broadcast(copy)
            parts = [part_of(entry, place) for entry in entries]
            del place  # as above
            yield parts
            del parts
        if relay is not None:
            relay.end()


def entry_of(part: Part, place: torch.Tensor) -> Entry:
    """Return what :func:`part_of` makes the part of, whose tensor lies in `place`."""
    return {
        "name": part.name,
        "experts": list(part.experts),
        "shape": list(part.shape),
        "dtype": str(part.tensor.dtype).removeprefix("torch."),
        "offset": part.tensor.data_ptr() - place.data_ptr(),
        "size": list(part.tensor.shape),
        "stride": list(part.tensor.stride()),
    }


def part_of(entry: Entry, place: torch.Tensor) -> Part:
    """Return the part that lies in `place` as :func:`entry_of` said of another place with the same bytes."""
    dtype = getattr(torch, entry["dtype"])
    flat = place[entry["offset"] :]
    flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    tensor = flat.as_strided(entry["size"], entry["stride"])
    return Part(entry["name"], tuple(entry["shape"]), tensor, tuple(entry["experts"]))
