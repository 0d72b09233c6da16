"""The GPUs that processes of this machine can have, as far as files and variables show it: no library is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path


def has_driver() -> bool:
    """Return whether NVIDIA's driver seems to be here: as a module of the kernel, its devices, or as WSL passes it."""
    places = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg")
    return any(os.path.exists(place) for place in places) or shutil.which("nvidia-smi") is not None


def torch_build() -> str | None:
    """Return the version of torch, which ends in +cpu if it was built for CPUs only; None if it is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> int:
    """Return how many GPUs have a device file; none has one under WSL."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))


def visible() -> tuple[int, str] | None:
    """Return how many GPUs a process sees at most, and what says so; None if nothing does.

    CUDA reads CUDA_VISIBLE_DEVICES up to its first name that is none, and a container has the devices that it was
    given. There may be fewer.
    """
    found = []
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        count = 0
        for name in map(str.strip, names.split(",")):
            if name in ("", "-1"):
                break
            count += 1
        found.append((count, f"CUDA_VISIBLE_DEVICES={names} names {_counted(count)}"))
    if count := devices():
        found.append((count, f"this machine has {_counted(count)} (/dev/nvidia0 ...)"))
    return min(found, default=None)


def _counted(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"
