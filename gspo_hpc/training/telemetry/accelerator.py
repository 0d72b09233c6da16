"""The device of this rank: the most memory that a phase took, and how busy it was.

On the CPU the memory is that of this process (not of its engine's), as the kernel counts it. The part for GPUs
has not been run on one yet.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch

from gspo_hpc.planning.estimates import devices

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.5


class Accelerator:
    """The device of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: list[float] = []
        self._stop = threading.Event()
        cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if cuda else "CPU"
        self.peak_flops = devices.peak(self.name) if cuda else None
        if cuda:
            threading.Thread(target=self._sample, name="device-use", daemon=True).start()

    def reset_peak(self) -> None:
        """Count the most memory from here on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # a kernel that does not let a process do so to itself
                _CLEAR.write_text("5")

    def peak_memory(self) -> int:
        """Return the most bytes since :meth:`reset_peak`: allocated ones on a GPU, resident ones on the CPU."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def named_range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a block that Nsight Systems shows by this name (NVTX); on the CPU there is none."""
        if self._device.type == "cuda":
            return torch.cuda.nvtx.range(name)  # type: ignore[no-any-return]  # torch leaves it untyped
        return contextlib.nullcontext()

    def use(self) -> float | None:
        """Return the share of time in which the GPU was at work since the last call; None if it is not known."""
        samples, self._busy = self._busy, []
        return sum(samples) / len(samples) / 100.0 if samples else None

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()

    def _sample(self) -> None:
        with contextlib.suppress(Exception):  # without NVML's Python package it is not known
            while not self._stop.wait(_SAMPLE_SECONDS):
                self._busy.append(float(torch.cuda.utilization(self._device)))
