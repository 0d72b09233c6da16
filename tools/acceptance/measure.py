"""Measurements that several parts make: waiting for the device, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from .environment import Environment

FLAT = 64 << 20  # bytes by which memory may move where it should stay the same


def synchronize(env: Environment) -> None:
    """Return when the device has done what it was given."""
    if env.cuda:
        torch.cuda.synchronize()


def memory_used(env: Environment, others: Iterable[int] = ()) -> int:
    """Return the bytes that all processes have of the GPU; on a CPU the resident ones of this and the `others`."""
    if env.cuda:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return sum(_resident(pid) for pid in (os.getpid(), *others))


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next((line for line in status.splitlines() if line.startswith("VmRSS")), "VmRSS: 0 kB")
    return int(line.split()[1]) * 1024
