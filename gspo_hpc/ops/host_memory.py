"""Host memory that is kept from one copy to the next, page-locked where it is copied from or to a GPU.

torch's own page-locked memory rounds every block up to a power of two (``CachingHostAllocator``), which takes a third
more on average, of memory that no other process of the node can use. Here pages are mapped as they are needed and then
locked by ``cudaHostRegister``; torch recognizes them, so copies with ``non_blocking`` do not wait.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from gspo_hpc.system.text import in_gib

# Locking a block takes a millisecond, so small tensors share one.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 256  # bytes, as of GPU memory


class HostMemory:
    """Tensors in host memory, which live as long as this object. Nothing is ever given back to it."""

    def __init__(self) -> None:
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
        length = -(-max(size, BLOCK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
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


def _unlock(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
