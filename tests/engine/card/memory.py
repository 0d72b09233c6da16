"""A strict imitation of a GPU's memory: what vLLM's compiled allocator and CUDA's IPC do, and an error for each misuse.

Memory has real addresses in this process. What is unmapped holds noise, so nobody gets it back by luck. The imitation
stands for C and CUDA only: vLLM's allocator, torch's ``rebuild_cuda_tensor`` and all that call them are the real ones.
To torch all tensors are on the CPU.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor
from torch.overrides import TorchFunctionMode

PAGE = 2 << 20  # bytes: the granularity of a GPU's memory
NOISE = 0xA5
UUID = "GPU-00000000-0000-0000-0000-000000000000"

Handle = tuple[int, int, int, int]  # device, size, address, and the address of what describes the memory


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class Misuse(RuntimeError):
    """Error raised for what CUDA would refuse or would not survive."""


@dataclass
class Export:
    """One export of a tensor for another process, as torch counts it."""

    storage: StorageWeakRef
    address: int
    nbytes: int
    count: int = 1  # until the process that maps it releases it


@dataclass
class Segment:
    """Memory that one pool got from the compiled allocator."""

    handle: Handle
    storage: StorageWeakRef


@dataclass
class Pool:
    """The imitation of torch.cuda.MemPool."""

    allocator: Any
    segments: list[Segment] = field(default_factory=list)

    def snapshot(self) -> list[dict[str, int]]:
        """Return address and used bytes of each segment."""
        sizes = [(s.handle[2], 0 if s.storage.expired() else s.handle[1]) for s in self.segments]
        return [{"address": address, "allocated_size": used, "total_size": used} for address, used in sizes]


class Card:
    """The memory of one GPU, its mappings, pools and exports."""

    def __init__(self, total: int = 64 * PAGE) -> None:
        self.total = total
        self.exports: list[Export] = []
        self.mapped: dict[int, int] = {}  # address -> bytes
        self._reserved: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._plain: list[tuple[StorageWeakRef, int, int]] = []  # tensors outside of vLLM's pools: address, bytes
        self._process = 0  # which engine's process maps exports now
        self._maps: set[int] = set()  # exports that it maps
        self._pool: Pool | None = None
        self._callbacks: tuple[Callable[[Handle], None], Callable[[int], Handle]] | None = None

    # ---- vllm.cumem_allocator, the compiled part

    def init_module(self, malloc: Callable[[Handle], None], free: Callable[[int], Handle]) -> None:
        """Keep the two functions that tell vLLM's allocator of new and freed memory."""
        self._callbacks = malloc, free

    def python_create_and_map(self, device: int, size: int, address: int, description: int) -> None:
        """Map fresh memory at a reserved address. Raises Misuse for a second map, and for more than the card has."""
        if address in self.mapped:
            raise Misuse(f"CUDA_ERROR_INVALID_VALUE: {address:#x} is mapped already")
        if address not in self._reserved or len(self._reserved[address]) != size or description != address + 1:
            raise Misuse(f"CUDA_ERROR_INVALID_VALUE: {address:#x} is not reserved with {size} bytes")
        self._require(size)
        self.mapped[address] = size

    def python_unmap_and_release(self, device: int, size: int, address: int, description: int) -> None:
        """Unmap memory, and leave noise. Raises Misuse for what is not mapped."""
        if self.mapped.get(address) != size:
            raise Misuse(f"CUDA_ERROR_INVALID_VALUE: {address:#x} is not mapped with {size} bytes")
        ctypes.memset(address, NOISE, size)
        del self.mapped[address]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy like cudaMemcpy. Raises Misuse where one end is memory of the card that is not mapped."""
        for address in (target, source):
            for start, memory in self._reserved.items():
                if start <= address < start + len(memory) and start not in self.mapped:
                    raise Misuse(f"CUDA_ERROR_ILLEGAL_ADDRESS: {address:#x} is not mapped")
        ctypes.memmove(target, source, nbytes)

    # ---- memory

    def used(self) -> int:
        """Return the bytes that are taken: mapped memory, tensors, and exports that nobody has released."""
        self.collect()
        lost = {e.address: e.nbytes for e in self.exports if e.count and e.storage.expired()}
        return sum(self.mapped.values()) + sum(nbytes for *_, nbytes in self._plain) + sum(lost.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in this memory."""
        address = tensor.data_ptr()
        places = [*((start, len(memory)) for start, memory in self._reserved.items())]
        places += [(start, nbytes) for _, start, nbytes in self._plain]
        return any(start <= address < start + nbytes for start, nbytes in places)

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return new memory as bytes [nbytes] of noise: of the active pool, else of the card itself."""
        if self._pool is not None:
            return self._from_pool(self._pool, nbytes)
        self._require(nbytes)
        made = torch.full((nbytes,), NOISE, dtype=torch.uint8)
        self._plain.append((StorageWeakRef(made.untyped_storage()), made.data_ptr(), nbytes))
        return made

    @contextmanager
    def use(self, pool: Pool) -> Iterator[None]:
        """Take new memory from `pool`."""
        before, self._pool = self._pool, pool
        try:
            yield
        finally:
            self._pool = before

    def _from_pool(self, pool: Pool, nbytes: int) -> torch.Tensor:
        size = max(1, math.ceil(nbytes / PAGE)) * PAGE
        self._require(size)
        memory = (ctypes.c_char * size)()
        address = ctypes.addressof(memory)
        ctypes.memset(address, NOISE, size)
        self._reserved[address], self.mapped[address] = memory, size
        handle = (0, size, address, address + 1)
        assert self._callbacks is not None, "init_module comes first"
        self._callbacks[0](handle)
        made = torch.frombuffer(memory, dtype=torch.uint8, count=max(1, nbytes))[:nbytes]
        pool.segments.append(Segment(handle, StorageWeakRef(made.untyped_storage())))
        return made

    def _require(self, nbytes: int) -> None:
        if self.used() + nbytes > self.total:
            raise torch.OutOfMemoryError(f"{nbytes} bytes wanted, {self.total - self.used()} of {self.total} are free")

    # ---- CUDA IPC

    def export(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Export a tensor as torch's ``reduce_tensor`` does: the same tuple, and a new counter that begins with 1."""
        storage = tensor.untyped_storage()
        self.exports.append(Export(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        counter = len(self.exports) - 1
        handle, kind = f"memory at {storage.data_ptr():#x}".encode(), torch.storage.TypedStorage
        shape = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), kind, tensor.dtype)
        place = (0, handle, storage.nbytes(), 0, tensor.requires_grad, b"counters", counter, b"event", True)
        return rebuild_cuda_tensor, (*shape, *place)

    def new_shared(
        self, device: int, handle: bytes, nbytes: int, offset: int, counters: bytes, counter: int, *event: Any
    ) -> torch.UntypedStorage:
        """Map an export, as torch's compiled function does: its counter falls when the last tensor on it is gone."""
        export = self.exports[counter]
        if export.storage.expired():
            raise Misuse("an export was mapped whose memory its owner has freed")
        if counter in self._maps or export.count < 1:
            raise Misuse("an export was mapped a second time, or after it was released")
        self._maps.add(counter)
        memory = (ctypes.c_char * nbytes).from_address(export.address + offset)
        weakref.finalize(memory, self._end_mapping, self._process, counter)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def release(self, counters: bytes, counter: int) -> None:
        """Count a release of an export. Raises Misuse as long as a process maps it, and for a second one."""
        if counter in self._maps:
            raise Misuse("memory was given back that a worker still maps")
        self.exports[counter].count -= 1
        if self.exports[counter].count < 0:
            raise Misuse("an export was released twice")

    def end_process(self) -> None:
        """End the engine's process as SIGKILL does: what it has mapped is gone, and nobody counts."""
        self._process += 1
        self._maps.clear()
        self.mapped.clear()

    def collect(self) -> None:
        """Forget tensors that are gone, as torch.cuda.ipc_collect does with exports that were released."""
        self._plain = [entry for entry in self._plain if not entry[0].expired()]

    def counts(self) -> list[int]:
        """Return the counter of every export ever made: 0 where releases match it."""
        return [export.count for export in self.exports]

    def _end_mapping(self, process: int, counter: int) -> None:
        if process == self._process:
            self._maps.discard(counter)
            self.release(b"", counter)


class OnCard(TorchFunctionMode):
    """Put tensors that are asked for on a GPU into the card's memory."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        if func == _IS_CUDA:
            return func(*args) or self.card.holds(args[0])
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        places = [*args[1:], kwargs.get("device")] if func is torch.Tensor.to else [kwargs.get("device")]
        if not any(_is_cuda(place) for place in places):
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            rest = [a for a in args[1:] if not _is_cuda(a)]
            options = {k: v for k, v in kwargs.items() if k != "device"}
            return self._placed(args[0].to(*rest, **options) if rest or options else args[0])
        made = func(*args, **{**kwargs, "device": "cpu"})
        return self._placed(made) if isinstance(made, torch.Tensor) else made

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        room = self.card.tensor(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        with torch.no_grad():
            room.copy_(tensor.detach())
        return room.requires_grad_(tensor.requires_grad)


def _is_cuda(place: Any) -> bool:
    if isinstance(place, int) and not isinstance(place, bool):
        return True  # a number of a GPU
    return isinstance(place, str | torch.device) and torch.device(place).type == "cuda"
