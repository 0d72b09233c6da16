"""Tensors that come together while a checkpoint is written: those of an optimizer that data-parallel ranks share.

In the sharded state they are tensors without memory. torch's writer asks the :class:`Planner` for one after the other,
in the order in which their elements come from other ranks, and a few rows at a time where a tensor is larger than a
bucket. So nothing is whole in host memory but what is being written.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from gspo_hpc.checkpoint import shared_optimizer
from gspo_hpc.checkpoint.shared_optimizer import Gathering, Place, Share

_ADDRESSES = 1 << 56  # elements: more than any rank saves
_At = tuple[str, tuple[int, ...]]  # key of a tensor, and where a piece of it begins


class Assembly:
    """Tensors that one save puts together. All ranks add the same optimizers in the same order."""

    def __init__(self, group: dist.ProcessGroup, place: Place | None) -> None:
        """Take a gloo group of all ranks, and `place`, which gives memory for copies; None if nothing changes."""
        self._group, self._place = group, place
        self._gatherings: list[Gathering] = []
        # Every element has an address, so a view of a stand-in says what it is a view of: no two begin alike. What
        # comes first has lower ones.
        self._addresses = torch.empty(_ADDRESSES, dtype=torch.float32, device="meta")
        self._begins: list[int] = []
        self._end = 0
        self._tensors: list[tuple[Gathering, int, str]] = []  # with index of the parameter and key, as they begin
        self._found: dict[_At, int] = {}  # addresses of the pieces that Megatron saves
        self._pieces: dict[_At, tuple[int, Sequence[int]]] = {}  # address and shape of what is written at once
        self._asked = 0  # no lower address is asked for any more

    def add(self, part: Any, keys: Sequence[str], every: Sequence[Share]) -> dict[int, dict[str, torch.Tensor]]:
        """Return stand-ins for the tensors that this rank owns, flat, by index of the parameter and key.

        For the arguments see :class:`Gathering`.
        """
        number, place = len(self._gatherings), self._place
        named = None if place is None else lambda name, size: place(f"{number}.{name}", size)
        gathering = Gathering(part, keys, every, self._group, named)
        self._gatherings.append(gathering)
        return {share.index: {key: self._stand_in(gathering, share, key) for key in keys} for share in gathering.owned}

    def _stand_in(self, gathering: Gathering, share: Share, key: str) -> torch.Tensor:
        size = share.parameter.numel()
        begin, self._end = self._end, self._end + size
        self._begins.append(begin)
        self._tensors.append((gathering, share.index, key))
        return self._addresses[begin : begin + size]

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (target, source) of all that this rank has to copy before it changes."""
        return [pair for one in self._gatherings for pair in one.copies]

    def find(self, state: Mapping[str, Sequence[ShardedBase]]) -> None:
        """Note what there is for stand-ins in Megatron's sharded state by key, which may split them."""
        for key, parts in state.items():
            for part in parts:
                if isinstance(part, ShardedTensor) and part.data.is_meta:
                    if not part.data.is_contiguous():
                        raise RuntimeError(f"{key} is saved in columns: a part of it has gaps")
                    self._found[key, tuple(part.global_offset)] = part.data.storage_offset()

    def in_order(self, items: Iterable[WriteItem]) -> list[WriteItem]:
        """Return what torch is to write: first what is there, then what comes, in its order and in pieces."""
        there: list[WriteItem] = []
        coming: list[tuple[int, WriteItem]] = []
        for item in items:
            address = self._found.get(_place(item.index))
            if address is None:
                there.append(item)
                continue
            for begin, piece in self._cut(item, address):
                assert piece.tensor_data is not None
                self._pieces[_place(piece.index)] = begin, piece.tensor_data.chunk.sizes
                coming.append((begin, piece))
        return [*there, *(item for _, item in sorted(coming, key=lambda one: one[0]))]

    def _cut(self, item: WriteItem, address: int) -> Iterator[tuple[int, WriteItem]]:
        """Yield pieces of an item with their addresses: rows of at most a bucket, where they come from other ranks."""
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        axis = next((axis for axis, size in enumerate(chunk.sizes) if size > 1), 0)
        row = math.prod(chunk.sizes[axis + 1 :])
        most = max(1, shared_optimizer.SAVE_TRANSIT_BYTES // torch.float32.itemsize // row)
        gathering, index, _, begin = self._tensor(address)
        if chunk.sizes[axis] <= most or gathering.holds(index, begin, begin + math.prod(chunk.sizes)):
            yield address, item
            return
        for first in range(0, chunk.sizes[axis], most):
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            offsets[axis] += first
            sizes[axis] = min(most, sizes[axis] - first)
            piece = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            yield (
                address + first * row,
                replace(
                    item,
                    index=MetadataIndex(item.index.fqn, piece.offsets),
                    tensor_data=replace(item.tensor_data, chunk=piece),
                ),
            )

    def values(self, index: MetadataIndex) -> tuple[torch.Tensor, bool] | None:
        """Return what torch is to write at this place, and whether it was put together for that alone.

        None where that is in the state already. Waits for other ranks. Raises RuntimeError unless it is asked in the
        order of :meth:`in_order`: elements that were passed over may be gone.
        """
        if _place(index) not in self._pieces:
            return None
        address, shape = self._pieces[_place(index)]
        if address < self._asked:
            raise RuntimeError(f"torch does not write in the order of its plan: {index} comes too late")
        self._asked = address + math.prod(shape)
        gathering, parameter, key, begin = self._tensor(address)
        for earlier in self._gatherings[: self._gatherings.index(gathering)]:
            earlier.rest()  # a rank that needs more of it would wait for this one, and in the next one this one for it
        end = begin + math.prod(shape)
        found = gathering.elements(parameter, key, begin, end).view(*shape)
        return found, not gathering.holds(parameter, begin, end)

    def _tensor(self, address: int) -> tuple[Gathering, int, str, int]:
        """Return what has this address: a gathering, a parameter of it, a key, and the element's number there."""
        place = bisect.bisect_right(self._begins, address) - 1
        return *self._tensors[place], address - self._begins[place]

    def rest(self) -> None:
        """Send other ranks what they still need, once this one has written its part or has failed to. Collective."""
        for one in self._gatherings:
            one.rest()


class Planner(MCoreSavePlanner):
    """Megatron's planner, which gets from an assembly what comes together while it is written.

    Relies on ``MCoreSavePlanner``, whose arguments, ``create_local_plan`` and ``resolve_data`` are those of torch's
    DefaultSavePlanner (0.16 to 0.19), and on torch's writer, which asks for tensors in the order of the plan, for each
    when the one before is written (2.13; with one thread and nothing copied ahead).
    """

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._assembly = assembly
        self._written: torch.Tensor | None = None  # once torch asks for the next one

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes, in the order in which it can."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=self._assembly.in_order(plan.items))
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what torch writes for `write_item`.

        The writer keeps the last tensor of every name until its file is whole (torch 2.13). So what was made to be
        written has no memory any more when it asks for the next one, and what is held is given in a form that it does
        not copy: with a storage that ends where the tensor does.
        """
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
            self._written = None
        found = self._assembly.values(write_item.index)
        if found is None:
            return super().resolve_data(write_item)
        values, made = found
        if made or not values.is_cpu:
            self._written = values = values.cpu()
            return values
        return torch.from_numpy(values.numpy())


def _place(index: MetadataIndex) -> _At:
    return index.fqn, tuple(index.offset or ())
