"""The time that this rank is in collectives.

With gloo a rank does nothing else while it waits for a collective: every wait goes through one method of
torch's, which is timed here. With NCCL the host does not wait; the durations of its kernels come from torch's flight
recorder, which times them when asked to by the environment, before the first process group is made. The part for NCCL
has not been run on a GPU yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from gspo_hpc.training import compat

# What makes the flight recorder keep enough collectives of one step, with their times.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "20000"}


class CollectiveTime:
    """A clock that runs while this process is in collectives. `seconds` never goes back."""

    def __init__(self, platform: str) -> None:
        self._nccl = platform == "cuda"
        self._seconds = 0.0
        self._newest = -1  # record of NCCL's that has been counted
        if self._nccl:
            for name, value in NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        else:
            compat.wrap_wait(self._timed)

    @property
    def seconds(self) -> float:
        """Seconds since this object was made. With NCCL, ask once a phase: the recorder forgets."""
        if self._nccl:
            self._count_records()
        return self._seconds

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._seconds += time.perf_counter() - began

        return wait

    def _count_records(self) -> None:
        torch.cuda.synchronize()
        for entry in compat.nccl_records():
            if entry["record_id"] > self._newest and entry.get("duration_ms") is not None:
                self._newest = entry["record_id"]
                self._seconds += entry["duration_ms"] / 1000.0
