"""Messages between ranks over host memory: from rank to rank in chunks of bounded size, and along trees.

Only the depth of a tree grows with the number of ranks. A rank connects only to ranks that it exchanges data with;
data stays in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from gspo_hpc.exchange import wire_format
from gspo_hpc.exchange.wire_format import WIDTH, Header, Item
from gspo_hpc.system.progress import mark

CHUNK_BYTES = 1 << 20  # of a payload, in flight between two ranks
_TAG = 0

Merge = Callable[[Sequence[bytes]], bytes]


class Transport:
    """This rank's end of all connections; a transport without a group is that of a job of one rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a gloo group of all ranks."""
        self._group = group
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        self.sent = self.received = 0  # bytes

    def exchange(self, outgoing: Mapping[int, Sequence[Item]], expected: Mapping[int, int]) -> dict[int, list[Item]]:
        """Send items to ranks, and return those received, by rank, ascending; `expected`: number of items by sender.

        Every rank that takes part calls it. Between two ranks one chunk is in flight in each direction, so no rank
        holds more of another's data than it asked for.
        """
        outgoing, expected = dict(sorted(outgoing.items())), dict(sorted(expected.items()))
        headers = {rank: wire_format.header_of(items) for rank, items in outgoing.items()}
        found: dict[int, Header] = {rank: np.empty((rows, WIDTH), np.int64) for rank, rows in expected.items()}
        self._round({r: _bytes(h) for r, h in headers.items()}, {r: _bytes(h) for r, h in found.items()})
        payloads = {rank: np.empty(wire_format.payload_bytes(header), np.uint8) for rank, header in found.items()}
        cut = {rank: wire_format.chunks(items, CHUNK_BYTES) for rank, items in outgoing.items()}
        begin = 0
        while cut or any(len(payload) > begin for payload in payloads.values()):
            sending = {rank: piece for rank, pieces in cut.items() if (piece := next(pieces, None)) is not None}
            cut = {rank: cut[rank] for rank in sending}
            self._round(sending, {rank: payload[begin : begin + CHUNK_BYTES] for rank, payload in payloads.items()})
            begin += CHUNK_BYTES
        return {rank: wire_format.unpack(header, payloads[rank]) for rank, header in found.items()}

    def broadcast(self, items: Sequence[Item], rows: int, members: Sequence[int]) -> list[Item]:
        """Return the `rows` items of the first of `members` on all of them, each of which calls it.

        They go down a binary tree, so a rank receives them once and sends them at most twice.
        """
        place = members.index(self.rank)
        if len(members) == 1:
            return list(items)
        parent = members[(place - 1) // 2] if place else None
        children = members[2 * place + 1 : 2 * place + 3]
        header = wire_format.header_of(items) if parent is None else np.empty((rows, WIDTH), np.int64)
        assert len(header) == rows, (len(header), rows)
        self._down([_bytes(header)], parent, children)
        if parent is None:
            self._down(wire_format.chunks(items, CHUNK_BYTES), None, children)
            return list(items)
        payload = np.empty(wire_format.payload_bytes(header), np.uint8)
        cut = [payload[begin : begin + CHUNK_BYTES] for begin in range(0, len(payload), CHUNK_BYTES)]
        self._down(cut, parent, children)
        return wire_format.unpack(header, payload)

    def barrier(self) -> None:
        """Return once every rank has called it, from host to host. Collective."""
        self.tree_all_reduce(b"", lambda parts: b"")

    def tree_all_reduce(self, mine: bytes, merge: Merge) -> bytes:
        """Return on all ranks what `merge` makes of every rank's bytes. Collective.

        They are merged up a binary tree, so `merge` also gets its own results; the root's result is sent down.
        """
        merged = self.tree_gather(mine, merge)
        if merged is None:
            merged = self._receive(self._above)
        self._send(merged, self._below)
        return merged

    def sum(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sum of every rank's counts, arrays of one shape, on all ranks. Collective."""

        def merge(parts: Sequence[bytes]) -> bytes:
            return np.sum([np.frombuffer(part, "<i8") for part in parts], axis=0, dtype="<i8").tobytes()

        total = self.tree_all_reduce(counts.astype("<i8").tobytes(), merge)
        return np.frombuffer(total, "<i8").reshape(counts.shape)

    def tree_gather(self, mine: bytes, merge: Merge) -> bytes | None:
        """Return on rank 0 what `merge` makes of every rank's bytes, and None elsewhere; see :meth:`tree_all_reduce`.

        Collective.
        """
        merged = merge([mine, *(self._receive(rank) for rank in self._below)])
        if not self.rank:
            return merged
        self._send(merged, [self._above])
        return None

    @property
    def _above(self) -> int:
        return (self.rank - 1) // 2

    @property
    def _below(self) -> list[int]:
        first = 2 * self.rank + 1
        return [rank for rank in (first, first + 1) if rank < self.world_size]

    def _down(self, pieces: Iterable[npt.NDArray[np.uint8]], parent: int | None, children: Sequence[int]) -> None:
        """Hand every piece on to the children, after it has come from the parent if there is one."""
        under_way: list[dist.Work] = []
        for piece in pieces:
            mark()
            if parent is not None:
                self._begin_receiving(piece, parent).wait()
            begun = [self._begin_sending(piece, rank) for rank in children]
            _wait(under_way)
            under_way = begun
        _wait(under_way)

    def _round(
        self, outgoing: Mapping[int, npt.NDArray[np.uint8]], incoming: Mapping[int, npt.NDArray[np.uint8]]
    ) -> None:
        """Send one buffer to each of some ranks and receive one from each of some ranks; empty ones are not sent."""
        mark()
        work = [self._begin_receiving(buffer, rank) for rank, buffer in incoming.items() if len(buffer)]
        work += [self._begin_sending(buffer, rank) for rank, buffer in outgoing.items() if len(buffer)]
        _wait(work)

    def _begin_sending(self, buffer: npt.NDArray[np.uint8], rank: int) -> dist.Work:
        assert self._group is not None
        self.sent += len(buffer)
        return self._group.send([torch.from_numpy(buffer)], rank, _TAG)

    def _begin_receiving(self, buffer: npt.NDArray[np.uint8], rank: int) -> dist.Work:
        assert self._group is not None
        self.received += len(buffer)
        return self._group.recv([torch.from_numpy(buffer)], rank, _TAG)

    def _send(self, payload: bytes, ranks: Sequence[int]) -> None:
        size = np.array([len(payload)], np.int64)
        whole = np.frombuffer(bytearray(payload), np.uint8)
        self._round({rank: _bytes(size) for rank in ranks}, {})
        self._round({rank: whole for rank in ranks}, {})

    def _receive(self, rank: int) -> bytes:
        size = np.zeros(1, np.int64)
        self._round({}, {rank: _bytes(size)})
        whole = np.empty(int(size[0]), np.uint8)
        self._round({}, {rank: whole})
        return whole.tobytes()


def gather_unordered(transport: Transport, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, which have no line break, on all ranks and in any order. Collective."""
    return transport.tree_all_reduce(mine, b"\n".join).split(b"\n")


def _bytes(array: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _wait(work: Sequence[dist.Work]) -> None:
    for one in work:
        one.wait()
