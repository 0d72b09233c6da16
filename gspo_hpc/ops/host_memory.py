"""Host memory that is kept from one copy to the next, page-locked where it is copied from or to a GPU.

torch's own page-locked memory rounds every block up to a power of two (``CachingHostAllocator``), which takes a third
more on average, of memory that no other process of the node can use. Here pages are mapped as they are needed and then
locked by ``cudaHostRegister``; torch recognizes them, so copies with ``non_blocking`` do not wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

from gspo_hpc.system.text import in_gib

# Locking a block takes a millisecond, so small tensors share one.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 256  # bytes, as of GPU memory
_PIECE_BYTES = 8 << 20  # of a copy that threads share


class HostMemory:
    """Tensors in host memory, which live as long as this object. Nothing is ever given back to it."""

    def __init__(self, block_bytes: int | None = None) -> None:
        """`block_bytes`: what small tensors share, by default BLOCK_BYTES; the last block may be next to empty."""
        self._block_bytes = block_bytes or BLOCK_BYTES
        self._blocks: list[tuple[mmap.mmap, int]] = []  # with the bytes of it that are in use
        self._locked: list[int] = []  # where a locked block begins
        weakref.finalize(self, _unlock, self._locked).atexit = False  # CUDA may have ended by then

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, locked: bool) -> torch.Tensor:
        """Return an uninitialized tensor of this shape; `locked`: page-locked, or RuntimeError if CUDA refuses."""
        elements = math.prod(shape)
        if not locked or elements == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        block, offset = self._room(elements * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=elements, offset=offset).view(tuple(shape))

    @property
    def bytes_locked(self) -> int:
        """Bytes of all blocks that are locked."""
        return sum(len(block) for block, _ in self._blocks)

    def _room(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a block with so much room, and where it begins; what is large gets a block of its own size."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        for place, (block, used) in enumerate(self._blocks):
            if len(block) - used >= size:
                self._blocks[place] = (block, used + size)
                return block, used
        length = -(-max(size, self._block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # If a child shared these pages, copy-on-write would move them, and the GPU would read stale ones.
        block.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # kernels without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        self._lock(block)
        self._blocks.append((block, size))
        return block, 0

    def _lock(self, block: mmap.mmap) -> None:
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(block), 0))
        if code != 0:
            raise RuntimeError(
                f"CUDA did not lock {in_gib(len(block), 2)} GiB of host memory (error {code}); "
                "ulimit -l, or the memory limit of the job, may be too small"
            )
        self._locked.append(address)


class HostCopy:
    """A copy of tensors into host memory, which other work may go on beside.

    The second tensor of every pair is copied into the first, of the same shape and in host memory. What comes from a
    GPU is copied by a stream of its own, after the work that the present stream has been given so far. Copies within
    host memory are made by those who call. Until the copy is made the sources must stay as they are: whoever is about
    to change them calls :meth:`before_change`, and whoever reads the copy :meth:`finish`.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs  # keeps their memory
        self._copied: torch.Event | None = None
        pieces: list[tuple[int, int, int]] = []
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in pairs:
            alike = target.dtype == source.dtype and target.device == source.device
            if not (alike and target.is_contiguous() and source.is_contiguous()):
                others.append((target, source))
                continue
            assert target.shape == source.shape
            for begin in range(0, source.nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, source.nbytes - begin)
                pieces.append((target.data_ptr() + begin, source.data_ptr() + begin, size))
        if any(source.is_cuda for _, source in others):
            self._copied = _copied_beside(others)
        else:
            _copy(others)
        self._rest, self._left = iter(pieces), len(pieces)
        self._moved = threading.Condition()

    def before_change(self) -> None:
        """Let what comes next change the sources: on the host, and on a GPU in its present stream.

        The stream waits for what is still being copied, and this thread does not.
        """
        self._move()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Return when everything is copied."""
        self._move()
        if self._copied is not None:
            self._copied.synchronize()
        self._pairs = ()

    def _move(self) -> None:
        """Make the copies within host memory. Threads that call this share the work: none waits for a slower one."""
        moved = 0
        for piece in self._rest:  # whoever is free takes the next one, which is atomic
            ctypes.memmove(*piece)  # without the interpreter's lock
            moved += 1
        with self._moved:
            self._left -= moved
            if self._left == 0:
                self._moved.notify_all()
            self._moved.wait_for(lambda: self._left == 0)


def _copied_beside(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
    """Copy in a stream beside the present one, and return the event that all is copied."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be computing the sources
    with torch.cuda.stream(stream):
        _copy(pairs)
    event: torch.Event = stream.record_event()
    return event


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source.detach(), non_blocking=True)


def _unlock(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
