"""Processes that SIGKILL does not end, as far as their parent can see."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# PTRACE_SEIZE: until its tracer waits for it, a killed process is not gone for its parent.
_TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print(libc.ptrace(0x4206, int(sys.argv[1]), 0, 0), ctypes.get_errno(), flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def immortal(pid: int) -> Iterator[None]:
    """Keep a process of this user, which must allow it, from ending within the block."""
    tracer = subprocess.Popen([sys.executable, "-c", _TRACER, str(pid)], env={}, stdout=subprocess.PIPE, text=True)
    with tracer:
        assert tracer.stdout is not None
        try:
            assert tracer.stdout.readline() == "0 0\n", "this kernel lets no process trace its neighbour"
            yield
        finally:
            tracer.kill()
