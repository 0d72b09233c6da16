"""Memory that a process freed and will want again in a few seconds, kept instead of given back to the system; or not.

Floor 1. A training step frees gigabytes of activations that the next step allocates again. glibc hands large blocks
back at once, and the kernel has to find and clear new pages for them: on a virtual machine, which may have to ask its
host for them, that was measured as a third of a CPU update. On GPUs torch's own caching allocator does this.

Work that has to stay within few bytes wants the opposite: blocks of many sizes, freed in another order than they were
taken in, leave a heap that is several times as large as what is ever in use.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

# The numbers of mallopt(3), and what they are set to: up to 2 GiB of free heap stay, and no block is mapped by itself,
# because what is mapped by itself is unmapped when it is freed.
_M_TRIM_THRESHOLD, _TRIM = -1, 2**31 - 1
_M_MMAP_MAX, _MAPPED = -4, 0
_M_MMAP_THRESHOLD = -3
_SMALL = 128 * 1024  # bytes: what is larger goes back when it is freed; what glibc begins with
_MANY = 65536  # blocks that may be mapped by themselves, glibc's own number

# The same for a process that is yet to be started, as glibc reads it from the environment.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(_TRIM), "MALLOC_MMAP_MAX_": str(_MAPPED)}


def keep_freed_memory() -> bool:
    """Have this process keep up to 2 GiB of freed heap, and take large blocks from it too; whether it does.

    False where the C library is not glibc; nothing is changed then.
    """
    global _kept
    _kept = _set(((_M_TRIM_THRESHOLD, _TRIM), (_M_MMAP_MAX, _MAPPED)))
    return _kept


@contextlib.contextmanager
def freed_memory_goes_back() -> Iterator[None]:
    """Within it, what this process frees goes back to the system, and what it had kept before goes at once."""
    _set(((_M_TRIM_THRESHOLD, _SMALL), (_M_MMAP_MAX, _MANY), (_M_MMAP_THRESHOLD, _SMALL)))
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        yield
    finally:
        if _kept:
            keep_freed_memory()


_kept = False  # whether this process keeps what it frees


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([bool(mallopt(*option)) for option in options])
