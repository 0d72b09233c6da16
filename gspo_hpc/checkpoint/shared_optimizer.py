"""The state of an optimizer that data-parallel ranks share: each gathers, saves, reads and scatters its own part.

Megatron's distributed optimizer gives every rank of a data-parallel group a flat piece of each bucket of parameters.
Its own way to save this whole makes every rank hold the state of all parameters. Here every parameter has an *owner*
among the ranks that hold a piece of it. The others send it theirs, a bounded number of bytes at a time, and the owner
alone saves the parameter; in a load it alone reads it, and sends the pieces back. So a rank holds about 1/dp of the
state in host memory, but at least one whole parameter, and writes and reads no more than that.

Shapes: every tensor here is flat. `begin` and `end` count elements from the first one of a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.checkpoint import compat
from gspo_hpc.config.constants import SAVE_TRANSIT_BYTES

Place = Callable[[str, int], torch.Tensor]  # host memory for a name and a number of fp32 elements


@dataclass(frozen=True)
class Piece:
    """The elements of a parameter that one rank of the data-parallel group holds."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Share:
    """A parameter, by its position among those of the optimizer, and who holds and who owns it."""

    index: int
    parameter: torch.Tensor
    pieces: tuple[Piece, ...]
    owner: int

    def of(self, rank: int) -> Piece | None:
        """Return the piece that a rank holds, if it holds one."""
        return next((piece for piece in self.pieces if piece.rank == rank), None)


@dataclass(frozen=True)
class _Move:
    """Elements of one tensor of a parameter that go from the rank that holds them to the owner, or back."""

    share: Share
    key: str
    holder: int
    offset: int  # in the holder's piece
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def shares(part: Any) -> list[Share]:
    """Return all parameters of a DistributedOptimizer; the same on every rank of its data-parallel group.

    The owner of a parameter is, among the ranks that hold a piece, the one that owns least so far.
    """
    size = part.data_parallel_group.size()
    owned = [0] * size
    found: list[Share] = []
    for buffer in part.buffers:
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            length = bucket.grad_data.numel() // size  # of a rank's piece of the bucket
            first, last = (start - bucket.offset) // length, (end - 1 - bucket.offset) // length
            pieces = []
            for rank in range(first, last + 1):
                begin = max(start, bucket.offset + rank * length) - start
                pieces.append(Piece(rank, begin, min(end, bucket.offset + (rank + 1) * length) - start))
            owner = min(pieces, key=lambda piece: (owned[piece.rank], piece.begin - piece.end)).rank
            owned[owner] += end - start
            found.append(Share(len(found), parameter, tuple(pieces), owner))
    return found


class Gathering:
    """The whole state of those of the parameters that this rank owns, gathered from the ranks that hold pieces of it.

    The memory is there from the start. Either :meth:`fill` fills it at once. Or somebody copies the tensors of
    :meth:`own`, and :meth:`exchange` brings the rest, in any order and in any thread; until both are done, the
    optimizer must stay as it is.
    """

    def __init__(self, part: Any, keys: Sequence[str], every: Sequence[Share], place: Place) -> None:
        """Take the same parameters `every` on all ranks of the data-parallel group of the DistributedOptimizer `part`.

        `keys`: "exp_avg", "exp_avg_sq" and, for an fp32 master, "param".
        """
        self._part, self._keys, self._every = part, keys, every
        self._rank = part.data_parallel_group.rank()
        self.whole = {  # by index of the parameter and key, in host memory
            share.index: {key: place(f"{share.index}.{key}", share.parameter.numel()) for key in keys}
            for share in every
            if share.owner == self._rank
        }

    def own(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (target, source) of what this rank holds of its parameters: the source of a GPU may be a copy there."""
        for share in self._every:
            if share.owner == self._rank:
                piece = share.of(self._rank)
                assert piece is not None, "owners are among the holders"
                for key, tensor in self.whole[share.index].items():
                    yield tensor[piece.begin : piece.end], _values(self._part, share.parameter, key)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy and exchange everything now, over the optimizer's own group. Collective."""
        for target, source in self.own():
            target.copy_(source)
        self.exchange(self._part.data_parallel_group)

    @torch.no_grad()
    def exchange(self, group: dist.ProcessGroup) -> None:
        """Bring the pieces that other ranks hold, over a group that has all ranks of the optimizer's. Collective."""

        def send(move: _Move) -> torch.Tensor:
            return _values(self._part, move.share.parameter, move.key)[move.offset : move.offset + move.elements]

        def target(move: _Move) -> torch.Tensor:
            return self.whole[move.share.index][move.key][move.begin : move.end]

        def receive(move: _Move, values: torch.Tensor) -> None:
            if values.data_ptr() != target(move).data_ptr():
                target(move).copy_(values)

        def landing(move: _Move) -> torch.Tensor:
            return target(move) if move.share.parameter.device.type == "cpu" else _empty(move)

        batches = _batches(self._every, self._keys)
        _exchange(Members(self._part, group), batches, send, landing, receive, to_owner=True)


@torch.no_grad()
def scatter(part: Any, keys: Sequence[str], whole: dict[int, dict[str, torch.Tensor]]) -> None:
    """Give every rank its pieces of what the owners of the parameters have read. The counterpart of gather. Collective.

    What arrives goes straight into the optimizer's own tensors, so that a card needs no more beside them than the
    batch that comes and the one that goes, however large a parameter is. A key that is missing is a master that is the
    parameter itself, which has its values already.
    """
    group = part.data_parallel_group
    me, every = group.rank(), shares(part)

    def take(share: Share, key: str, offset: int, values: torch.Tensor) -> None:
        held = compat.optimizer_tensors(part, share.parameter)[key].detach().view(-1)
        held[offset : offset + values.numel()].copy_(values)

    for share in every:
        own = share.of(me)
        if share.owner == me and own is not None:
            for key in keys:
                take(share, key, 0, whole[share.index][key].flatten()[own.begin : own.end])

    def send(move: _Move) -> torch.Tensor:
        values = torch.empty(move.elements, dtype=torch.float32, device=move.share.parameter.device)
        return values.copy_(whole[move.share.index][move.key].flatten()[move.begin : move.end])

    def receive(move: _Move, values: torch.Tensor) -> None:
        take(move.share, move.key, move.offset, values)

    _exchange(Members(part, group), _batches(every, keys), send, _empty, receive, to_owner=False)
    compat.settle_optimizer(part)


def _values(part: Any, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return this rank's piece of a tensor of a parameter, in fp32 on the parameter's device."""
    found = compat.optimizer_tensors(part, parameter)[key]
    return found.detach().flatten().to(parameter.device, torch.float32)


def _batches(every: Sequence[Share], keys: Sequence[str]) -> Iterator[list[_Move]]:
    """Yield all moves, in the same order on all ranks; in each batch SAVE_TRANSIT_BYTES come to a rank and go from it.

    Neighbouring parameters have different owners, so nearly all ranks of a group take part in a batch.
    """
    limit = SAVE_TRANSIT_BYTES // torch.float32.itemsize
    batch: list[_Move] = []
    coming, going = Counter[int](), Counter[int]()  # elements in the batch, by owner and by holder
    for share in every:
        for key in keys:
            for piece in share.pieces:
                begin = piece.begin if piece.rank != share.owner else piece.end
                while begin < piece.end:
                    room = limit - max(coming[share.owner], going[piece.rank])
                    if room == 0:
                        yield batch
                        batch, coming, going = [], Counter(), Counter()
                        continue
                    end = min(piece.end, begin + room)
                    batch.append(_Move(share, key, piece.rank, begin - piece.begin, begin, end))
                    coming[share.owner] += end - begin
                    going[piece.rank] += end - begin
                    begin = end
    if batch:
        yield batch


class Members:
    """The ranks of an optimizer's data-parallel group, in a group that talks for them."""

    def __init__(self, part: Any, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, part.data_parallel_group.rank()
        self._same = group is part.data_parallel_group
        self._ranks = [] if self._same else dist.get_process_group_ranks(part.data_parallel_group)

    def peer(self, rank: int) -> int:
        """Return the rank in the group that talks of a rank of the optimizer's group."""
        return rank if self._same else dist.get_group_rank(self.group, self._ranks[rank])


def _empty(move: _Move) -> torch.Tensor:
    return torch.empty(move.elements, dtype=torch.float32, device=move.share.parameter.device)


def _exchange(
    members: Members,
    batches: Iterable[Sequence[_Move]],
    send: Callable[[_Move], torch.Tensor],
    landing: Callable[[_Move], torch.Tensor],
    receive: Callable[[_Move, torch.Tensor], None],
    *,
    to_owner: bool,
) -> None:
    """Make all moves, from the holders to the owner or back: this rank sends and receives what concerns it.

    What comes arrives in the tensor of `landing`, and `receive` gets it.
    """
    for moves in batches:
        # In a call of its own, so that nothing of a batch is left when memory for the next one is taken.
        _exchange_batch(members, moves, send, landing, receive, to_owner=to_owner)


def _exchange_batch(
    members: Members,
    moves: Sequence[_Move],
    send: Callable[[_Move], torch.Tensor],
    landing: Callable[[_Move], torch.Tensor],
    receive: Callable[[_Move, torch.Tensor], None],
    *,
    to_owner: bool,
) -> None:
    me, group = members.rank, members.group
    operations, landed = [], []
    for tag, move in enumerate(moves):
        source, target = (move.holder, move.share.owner) if to_owner else (move.share.owner, move.holder)
        if source == me:
            tensor = send(move).contiguous()
            operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=members.peer(target), tag=tag))
        elif target == me:
            tensor = landing(move)
            operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=members.peer(source), tag=tag))
            landed.append((move, tensor))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for move, tensor in landed:
        receive(move, tensor)
