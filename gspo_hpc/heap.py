"""Memory that a process freed and will want again in a few seconds, kept instead of given back to the system.

Floor 1. A training step frees gigabytes of activations that the next step allocates again. glibc hands large blocks
back at once, and the kernel has to find and clear new pages for them: on a virtual machine, which may have to ask its
host for them, that was measured as a third of a CPU update. On GPUs torch's own caching allocator does this.
"""

from __future__ import annotations

import ctypes

# The numbers of mallopt(3), and what they are set to: up to 2 GiB of free heap stay, and no block is mapped by itself,
# because what is mapped by itself is unmapped when it is freed.
_M_TRIM_THRESHOLD, _TRIM = -1, 2**31 - 1
_M_MMAP_MAX, _MAPPED = -4, 0

# The same for a process that is yet to be started, as glibc reads it from the environment.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(_TRIM), "MALLOC_MMAP_MAX_": str(_MAPPED)}


def keep_freed_memory() -> bool:
    """Have this process keep up to 2 GiB of freed heap, and take large blocks from it too; whether it does.

    False where the C library is not glibc; nothing is changed then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM)) and bool(mallopt(_M_MMAP_MAX, _MAPPED))
