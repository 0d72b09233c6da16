"""The time that this rank is in collectives.

With gloo the main thread does nothing else while it waits for a collective: every wait goes through one method of
torch's, which is timed here. What the thread of a save waits for beside it is no time of the loop's. With NCCL the host
does not wait; the durations of its kernels come from torch's flight recorder, which times them when asked to by the
environment, before the first process group is made. It is read once a step, because a reading copies and parses all of
it. The part for NCCL has not been run on a GPU yet.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gspo_hpc.training import compat

# What makes the flight recorder keep enough collectives of one step, with their times.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "20000"}


@dataclass(frozen=True)
class Span:
    """A part of a phase, in nanoseconds of the system's clock (time.time_ns)."""

    phase: str
    began: int
    ended: int


class CollectiveTime:
    """A record of this process's collectives: when each began, and how long it took."""

    def __init__(self, platform: str) -> None:
        self._nccl = platform == "cuda"
        self._taken: list[tuple[int, float]] = []  # with gloo: nanosecond of the begin, seconds
        self._counted: set[int] = set()  # records of NCCL's
        self._before: Sequence[Span] = ()  # of the step before
        if self._nccl:
            for name, value in NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        else:
            compat.wrap_wait(self._timed)

    def seconds(self, spans: Sequence[Span]) -> dict[str, float]:
        """Return the seconds in collectives by phase, of a step whose phases had these spans until now.

        The recorder knows a duration up to a tenth of a second after the collective has ended. One that it did not know
        at the end of a step counts in the next one, under the phase in which it was made.
        """
        if self._nccl:
            torch.cuda.synchronize()
            self._read(compat.nccl_records())
        found: dict[str, float] = {}
        for span in (*self._before, *spans):
            within = sum(took for began, took in self._taken if span.began <= began < span.ended)
            found[span.phase] = found.get(span.phase, 0.0) + within
        return found

    def next_step(self, spans: Sequence[Span]) -> None:
        """Forget what was counted in the step that had these spans."""
        self._taken.clear()
        self._before = list(spans) if self._nccl else ()

    def _read(self, records: Sequence[Mapping[str, Any]]) -> None:
        known = {record["record_id"] for record in records}
        self._counted &= known  # the recorder has forgotten the others
        for record in records:
            if record["record_id"] not in self._counted and record.get("duration_ms") is not None:
                self._counted.add(record["record_id"])
                self._taken.append((record["time_created_ns"], record["duration_ms"] / 1000.0))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(*args, **options)
            stamp, began = time.time_ns(), time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._taken.append((stamp, time.perf_counter() - began))

        return wait
