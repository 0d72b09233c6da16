"""The state of an optimizer that data-parallel ranks share: each gathers, saves, reads and scatters its own part.

Megatron's distributed optimizer gives every rank of a data-parallel group a flat piece of each bucket of parameters.
Its own way to save this whole makes every rank hold the state of all parameters. Here every parameter has an *owner*
among the ranks that hold a piece of it. The others send it theirs, a bounded number of bytes at a time, and the owner
alone writes the parameter meanwhile; in a load it alone reads it, and sends the pieces back. So a rank writes and reads
about 1/dp of the state. To save it, a rank holds its own pieces in host memory, and a few buckets of what comes.

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
    """The state of those of the parameters that this rank owns, which comes from the ranks that hold pieces of it.

    Each rank copies its own pieces, which takes 1/dp of the state in host memory. While the checkpoint is written,
    :meth:`elements` brings those of other ranks, which are dropped as soon as they are written: a batch of them and
    what was asked for are all that is there beside the copy.
    """

    def __init__(
        self, part: Any, keys: Sequence[str], every: Sequence[Share], group: dist.ProcessGroup, place: Place | None
    ) -> None:
        """Take the same parameters `every` on all ranks of the data-parallel group of the DistributedOptimizer `part`.

        `keys`: "exp_avg", "exp_avg_sq" and, for an fp32 master, "param". `group`: one of gloo that has all these ranks.
        `place` gives memory for copies; None if the optimizer stays as it is until all is written.
        """
        self._members, self._copied = Members(part, group), place is not None
        self._batches = _batches(every, keys)
        self._shares = {share.index: share for share in every}
        self._held: dict[tuple[int, str], torch.Tensor] = {}  # by index of the parameter and key
        self._landed: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}  # ahead, with their first elements
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, source), for somebody else to make
        for share in every:
            if share.of(self._members.rank) is None:
                continue
            for key in keys:
                values = _values(part, share.parameter, key)
                if place is not None:
                    self.copies.append((place(f"{share.index}.{key}", values.numel()), values))
                    values = self.copies[-1][0]
                self._held[share.index, key] = values

    @property
    def owned(self) -> list[Share]:
        """The parameters that this rank owns, in the order in which their elements come."""
        return [share for share in self._shares.values() if share.owner == self._members.rank]

    def holds(self, index: int, begin: int, end: int) -> bool:
        """Return whether this rank has these elements of a parameter, so that nothing has to come."""
        piece = self._shares[index].of(self._members.rank)
        return piece is not None and piece.begin <= begin and end <= piece.end

    @torch.no_grad()
    def elements(self, index: int, key: str, begin: int, end: int) -> torch.Tensor:
        """Return elements of a tensor of a parameter that this rank owns, in the order in which they come.

        Brings batches until all of them are there. The other ranks bring them too, as they ask for their elements or
        for the :meth:`rest`: none is kept waiting by anything but the writing of others.
        """
        piece, held = self._shares[index].of(self._members.rank), self._held[index, key]
        assert piece is not None, "owners are among the holders"
        if self.holds(index, begin, end):
            return held[begin - piece.begin : end - piece.begin]
        found = torch.empty(end - begin, dtype=torch.float32)
        missing = found.numel() - _fill(found, begin, piece.begin, held)
        missing -= self._take_landed(found, (index, key), begin)

        def belongs(move: _Move) -> bool:  # and nothing of it comes later
            return (move.share.index, move.key) == (index, key) and move.end <= end

        def landing(move: _Move) -> torch.Tensor:
            return found[move.begin - begin : move.end - begin] if belongs(move) else _on_host(move)

        def receive(move: _Move, values: torch.Tensor) -> None:
            nonlocal missing
            if belongs(move):
                missing -= move.elements
                return
            if (move.share.index, move.key) == (index, key):
                missing -= _fill(found, begin, move.begin, values)
            self._landed.setdefault((move.share.index, move.key), []).append((move.begin, values))

        while missing:
            self._exchange(next(self._batches), landing, receive)
        return found

    @torch.no_grad()
    def rest(self) -> None:
        """Bring the batches that are left, of which this rank needs nothing: others do. Collective."""
        self._landed.clear()
        for moves in self._batches:
            self._exchange(moves, _on_host, lambda move, values: None)

    def _exchange(
        self,
        moves: Sequence[_Move],
        landing: Callable[[_Move], torch.Tensor],
        receive: Callable[[_Move, torch.Tensor], None],
    ) -> None:
        def send(move: _Move) -> torch.Tensor:
            held = self._held[move.share.index, move.key][move.offset : move.offset + move.elements]
            return held if self._copied or held.device.type == "cpu" else _on_host(move).copy_(held)

        _exchange_batch(self._members, moves, send, landing, receive, to_owner=True)

    def _take_landed(self, found: torch.Tensor, tensor: tuple[int, str], begin: int) -> int:
        """Fill in what came ahead, keep what belongs behind it, and return the number of elements."""
        landed = self._landed.pop(tensor, [])
        if behind := [one for one in landed if one[0] + one[1].numel() > begin + found.numel()]:
            self._landed[tensor] = behind
        return sum(_fill(found, begin, *one) for one in landed)


def _fill(found: torch.Tensor, begin: int, first: int, values: torch.Tensor) -> int:
    """Copy what two ranges of a tensor's elements share, and return how many that are.

    `found` has those from `begin`, `values` those from `first`.
    """
    start, stop = max(begin, first), min(begin + found.numel(), first + values.numel())
    if start < stop:
        found[start - begin : stop - begin].copy_(values[start - first : stop - first])
    return max(0, stop - start)


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


def _on_host(move: _Move) -> torch.Tensor:
    return torch.empty(move.elements, dtype=torch.float32)


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
