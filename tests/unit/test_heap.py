"""Freed memory stays with the process, so that the next step finds it warm."""

from __future__ import annotations

import subprocess
import sys

# Page faults of the third time that 400 MiB in blocks of 40 MiB are taken, filled and freed.
_PROGRAM = """
import resource, sys
from gspo_hpc import heap
if sys.argv[1] == "keep":
    assert heap.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    blocks = [bytearray(b"x") * (40 << 20) for _ in range(10)]
    taken = faults() - before
    del blocks
print(taken)
"""


def _faults(*arguments: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_freed_memory_is_used_again() -> None:
    pages = 400 << 20 >> 12
    assert _faults("give") > 0.8 * pages, "glibc keeps it by itself: gspo_hpc.heap has become useless"
    assert _faults("keep") < 0.1 * pages
