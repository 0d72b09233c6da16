"""Weights on their way from the ranks that train to those that generate, on GPUs or nodes of their own.

All training ranks gather the weights; the first of them broadcasts each bucket from where it was gathered into memory
of the receivers, from which their engines load it. The next bucket is gathered meanwhile. Before a bucket comes what is
in it, as JSON in host memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from gspo_hpc.ops.weight_parts import Memory, Part

if TYPE_CHECKING:
    from gspo_hpc.exchange.kept_weights import KeptWeights

Entry = dict[str, Any]  # what a receiver must know of a part: plain values


class Sent(Protocol):
    """A bucket on its way."""

    def wait(self) -> object:
        """Return once its memory is free. On a GPU the stream may wait for that instead of the host."""
        ...


class Announced(Protocol):
    """The end of the senders in a group, or what stands before it."""

    def announce(self, largest: int) -> None:
        """Tell the receivers the size of the largest bucket."""
        ...


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
        """Send all buckets, whose parts lie in the newest place of `memory`, each while the next one is gathered."""
        for parts in buckets:
            place = memory.newest
            assert place is not None
            memory.occupy(self.start([entry_of(part, place) for part in parts], place))
            del place  # else it would keep the memory
        memory.release()
        self.end()

    def start(self, entries: list[Entry], place: torch.Tensor) -> dist.Work:
        """Begin to send a bucket, which has these parts, and return what sends it."""
        self.announce_bucket(entries, place)
        return self._start(place)

    def announce_bucket(self, entries: list[Entry], place: torch.Tensor) -> None:
        """Tell the receivers what is in the bucket that comes next, so that they take memory for it."""
        self._tell({"bytes": place.numel(), "parts": entries})

    def end(self) -> None:
        """Tell the receivers that no bucket follows."""
        self._tell({})

    def stream(self, memory: Memory, keep: KeptWeights | None = None) -> Iterator[Sequence[Part]]:
        """Yield the parts that are sent, in `memory`, to the last one; `keep` has a copy of all in the end."""
        largest = 0
        while message := self._hear():
            if "largest" in message:
                largest = int(message["largest"])
                memory.reserve(largest)
                continue
            size = int(message["bytes"])
            if keep is not None and size > largest:
                keep.finish()  # else its copies would keep memory that has to be freed for a larger one
            place = memory.allocate(size)
            if keep is not None:
                keep.leave(place)
            self.broadcast(place)
            if keep is not None:
                keep.add(message["parts"], place)
            parts = [part_of(entry, place) for entry in message["parts"]]
            del place  # else it would keep this memory, if it has to be freed for larger parts
            yield parts
            del parts
        if keep is not None:
            keep.finish()  # before the memory is freed

    def announce(self, largest: int) -> None:
        """Tell the receivers the size of the largest bucket."""
        self._tell({"largest": largest})

    def broadcast(self, place: torch.Tensor) -> None:
        """Send the bucket that was announced, or receive it into `place`."""
        self._start(place).wait()
        if place.is_cuda:
            torch.cuda.current_stream().synchronize()  # workers of an engine read it, and a thread that keeps it

    def abort(self) -> None:
        """End what is under way, if that is on a GPU: its kernels would wait for ever for a member that has died."""
        if self._bulk is not self._host:
            self._bulk.abort()

    def _start(self, place: torch.Tensor) -> dist.Work:
        work: dist.Work = self._bulk.broadcast([place], dist.BroadcastOptions())
        return work

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


class SentMemory:
    """Memory of a training rank: the one that sends gathers a bucket in one half while the other half is sent.

    A bucket that is larger than `half` takes all of it. A rank that sends nothing has one place for all buckets.
    """

    def __init__(self, device: torch.device, half: int, broadcast: Announced | None) -> None:
        """`broadcast`: None on a rank that only takes part in gathering."""
        self.newest: torch.Tensor | None = None
        self._half, self._broadcast = half, broadcast
        self._begin = 0  # of the newest place
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._sent: list[tuple[int, int, Sent]] = []  # first and last byte, and what sends them

    def reserve(self, largest: int) -> None:
        """See Memory."""
        self.release()
        size = largest if self._broadcast is None else max(largest, 2 * self._half)
        self._bytes = self._bytes.new_empty(size)
        if self._broadcast is not None:
            self._broadcast.announce(largest)

    def allocate(self, size: int) -> torch.Tensor:
        """See Memory; this waits until what was there has been sent."""
        if self._bytes.numel() < size:
            self.reserve(size)
        halved = self._broadcast is not None and size <= self._half
        self._begin = self._half - self._begin if halved else 0
        self._leave(self._begin, self._begin + size)
        self.newest = self._bytes[self._begin : self._begin + size]
        return self.newest

    def occupy(self, sent: Sent) -> None:
        """Take note of what sends the newest place. On a GPU the stream waits for it, and not the host."""
        assert self.newest is not None
        self._sent.append((self._begin, self._begin + self.newest.numel(), sent))

    def release(self) -> None:
        """Free the memory, from which everything has been sent then: what the stream does next may use it."""
        self._leave(0, self._bytes.numel())
        self.newest = None
        self._bytes = self._bytes.new_empty(0)
        self._begin = 0

    def _leave(self, begin: int, end: int) -> None:
        """Wait until nothing in these bytes is left to be sent."""
        left = []
        for first, last, sent in self._sent:
            if first < end and begin < last:
                sent.wait()
            else:
                left.append((first, last, sent))
        self._sent = left


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
