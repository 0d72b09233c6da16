"""Settings of a process's memory: what glibc's malloc keeps of freed memory, and what Python's collector looks at.

A training step frees gigabytes of activations that the next step allocates again. glibc returns large blocks at once,
and the kernel has to find and clear new pages for them. Keeping them saves a tenth of the processor time of a step on a
CPU (docs/benchmarks.md, ``tools/bench/malloc.py``). Engines, which use the same small blocks for every token, gain
only while they load weights, layer by layer; on GPUs torch's own caching allocator keeps memory.

Work that has to stay within little memory needs the opposite: blocks of many sizes, freed in another order than they
were allocated, leave a heap several times as large as the memory that is ever in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

# Parameters of mallopt(3) and their values: up to 2 GiB of free heap stay, and no block is mapped on its own, because
# such a block is unmapped when it is freed.
_M_TRIM_THRESHOLD, _TRIM = -1, 2**31 - 1
_M_MMAP_MAX, _MAPPED = -4, 0
_M_MMAP_THRESHOLD = -3
_SMALL = 128 * 1024  # bytes, glibc's own default: larger blocks are returned when they are freed
_MANY = 65536  # blocks that may be mapped on their own, glibc's default


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB of freed heap in this process, and take large blocks from it, too.

    Returns False, without a change, if the C library is not glibc.
    """
    global _kept
    _kept = _set(((_M_TRIM_THRESHOLD, _TRIM), (_M_MMAP_MAX, _MAPPED)))
    return _kept


def return_freed_memory() -> None:
    """Return freed memory to the system from now on, and what was kept at once."""
    _set(((_M_TRIM_THRESHOLD, _SMALL), (_M_MMAP_MAX, _MANY), (_M_MMAP_THRESHOLD, _SMALL)))
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@contextlib.contextmanager
def freed_memory_goes_back() -> Iterator[None]:
    """Return freed memory to the system inside this block; memory that was kept before is returned at once."""
    return_freed_memory()
    try:
        yield
    finally:
        if _kept:
            keep_freed_memory()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Run a block of imports without garbage collection, and never look at what it made again.

    Next to nothing of it is garbage. The imports of a rank and of an engine make half a million objects, over which the
    collector goes again and again, and once more at every full collection after them (docs/benchmarks.md,
    ``tools/bench/imports.py``).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_kept = False  # this process keeps freed memory


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([bool(mallopt(*option)) for option in options])
