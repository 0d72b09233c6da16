"""The copy of the newest weights that the owner of an engine, or their sender, keeps to fill an engine that died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gspo_hpc.exchange.weight_broadcast import Entry, WeightBroadcast, part_of
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.ops.weight_parts import Memory, Part


class KeptWeights:
    """Weights in host memory, page-locked where they come from a GPU. A thread copies them while the next ones come.

    A bucket may be read by others meanwhile. Whoever writes into its memory calls :meth:`leave` before, and whoever
    frees it :meth:`finish`. An error of the thread is raised by the next of these calls.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()  # the thread's alone, as is the stream
        self._buckets: list[tuple[list[Entry], torch.Tensor]] = []
        self._filled = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._stream: torch.cuda.Stream | None = None
        self._under_way: list[tuple[int, int, Future[None]]] = []  # first and last address, in order

    def begin(self) -> None:
        """Expect all weights; their memory is that of the ones before."""
        self.finish()
        self._filled = 0

    def add(self, entries: list[Entry], place: torch.Tensor) -> None:
        """Keep the parts of one bucket, which is there for every stream: they are copied from now on."""
        begin, end = place.data_ptr(), place.data_ptr() + place.numel()
        number, self._filled = self._filled, self._filled + 1
        box = [place]
        del place  # the thread's is the only one, and it drops it before it says that it is done
        self._under_way.append((begin, end, self._thread.submit(self._copy, number, entries, box)))

    def leave(self, place: torch.Tensor) -> None:
        """Wait until nothing in `place` is left to be copied."""
        begin, end = place.data_ptr(), place.data_ptr() + place.numel()
        inside = (at for at, (first, last, _) in enumerate(self._under_way) if first < end and begin < last)
        self._wait(max(inside, default=-1) + 1)

    def finish(self) -> None:
        """Wait until everything is copied."""
        self._wait(len(self._under_way))

    def stream(self, memory: Memory, relay: WeightBroadcast | None = None) -> Iterator[Sequence[Part]]:
        """Yield all parts, in `memory`; `relay` takes them to ranks that keep none."""
        buckets = self.buckets()
        largest = max((copy.numel() for _, copy in buckets), default=0)
        memory.reserve(largest)
        if relay is not None:
            relay.announce(largest)
        for entries, copy in buckets:
            if relay is not None:
                relay.announce_bucket(entries, copy)
            place = memory.allocate(copy.numel()).copy_(copy)  # the ranks of an engine meet in it, the others as well
            if relay is not None:
                relay.broadcast(copy)
            parts = [part_of(entry, place) for entry in entries]
            del place  # else it would keep this memory, if it has to be freed for larger parts
            yield parts
            del parts
        if relay is not None:
            relay.end()

    def buckets(self) -> list[tuple[list[Entry], torch.Tensor]]:
        """Return all buckets, each with what is in it, for a sender who wants to send them again."""
        self.finish()
        return self._buckets[: self._filled]

    def _wait(self, count: int) -> None:
        """Wait for the first `count` copies that are under way; raise the error of one that failed."""
        done, self._under_way = self._under_way[:count], self._under_way[count:]
        for _, _, copied in done:
            copied.result()

    def _copy(self, number: int, entries: list[Entry], box: list[torch.Tensor]) -> None:
        """Copy the bucket in the box, in the thread."""
        place = box.pop()
        if not place.is_cuda:
            self._room(number, entries, place).copy_(place)
            return
        with torch.cuda.device(place.device):  # a new thread has the first one, where CUDA would begin anew
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                self._room(number, entries, place).copy_(place, non_blocking=True)
            self._stream.synchronize()

    def _room(self, number: int, entries: list[Entry], place: torch.Tensor) -> torch.Tensor:
        """Return memory for a bucket: that of the one before in its place, if it has the same size."""
        if number == len(self._buckets) or self._buckets[number][1].numel() != place.numel():
            del self._buckets[number:]
            copy = self._memory.empty(place.shape, torch.uint8, locked=place.is_cuda)
            self._buckets.append((entries, copy))
        copy = self._buckets[number][1]
        self._buckets[number] = entries, copy
        return copy
