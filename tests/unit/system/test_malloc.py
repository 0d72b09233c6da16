"""Freed memory stays with the process, so that the next step finds it warm."""

from __future__ import annotations

import subprocess
import sys

# Page faults of the third time that 400 MiB in blocks of 40 MiB are taken, filled and freed.
_PROGRAM = """
import resource, sys
from gspo_hpc.system import malloc
if sys.argv[1] == "keep":
    assert malloc.keep_freed_memory()
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
    assert _faults("give") > 0.8 * pages, "glibc keeps it by itself: gspo_hpc.system.malloc has become useless"
    assert _faults("keep") < 0.1 * pages


_ROUND_TRIP = """
import resource
from pathlib import Path
from gspo_hpc.system import malloc
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
malloc.keep_freed_memory()
def taken():
    before = resident()
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(200)]
    last = bytearray(b"x") * 1000
    del blocks
    return resident() - before, last
print(taken()[0])
with malloc.freed_memory_goes_back():
    print(resident())
    print(taken()[0])
print(taken()[0])
"""


def test_freed_memory_goes_back_where_it_must() -> None:
    done = subprocess.run([sys.executable, "-c", _ROUND_TRIP], check=True, capture_output=True, text=True, timeout=60)
    kept, resident, gone, kept_again = map(int, done.stdout.split())
    assert kept > 150 << 20 and resident < 100 << 20 and gone < 20 << 20 and kept_again > 150 << 20, done.stdout


def test_what_a_block_of_imports_makes_is_never_collected() -> None:
    """The collector is off inside, and on again after it, also after an error."""
    program = """
import gc, sys
from gspo_hpc.system.malloc import uncollected
before = gc.get_freeze_count()
try:
    with uncollected():
        assert not gc.isenabled()
        kept = [[] for _ in range(5000)]
        raise ImportError("a library is missing")
except ImportError:
    pass
assert gc.isenabled()
print(gc.get_freeze_count() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) >= 5000
