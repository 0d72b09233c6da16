"""The clock of a step on this rank: seconds by phase, counts of passes, and profiles of the steps that want one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.system.progress import mark
from gspo_hpc.training.telemetry import profiling
from gspo_hpc.training.telemetry.meter import Measured, Meter


class StepClock:
    """The measurements of one step after the other on this rank."""

    def __init__(
        self, meter: Meter, monitor: PassMonitor, *, profile_steps: Collection[int], traces: Path, rank: int
    ) -> None:
        self.monitor = monitor
        self.traces = traces  # folder of the traces of profiled steps
        self._meter, self._profile_steps, self._rank = meter, profile_steps, rank
        self._began = time.monotonic()

    @property
    def device(self) -> str:
        """The name of this rank's device."""
        return self._meter.device

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of the current step, by phase."""
        return self._meter.seconds

    def begin(self, step: int) -> None:
        """Begin a step, of which nothing is measured yet."""
        self._meter.begin(watch_memory=self.profiles(step))
        self.monitor.clear()
        self._began = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the step began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of this block to a phase of the current step, and report the phase as progress."""
        mark(name)
        try:
            with self._meter.phase(name):
                yield
        finally:
            mark(name)

    def profiles(self, step: int) -> bool:
        """Return True if tracking.profile_steps names the step."""
        return step in self._profile_steps

    def traced(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Return a block under torch's profiler if the step is to be profiled."""
        if not self.profiles(step):
            return contextlib.nullcontext()
        return profiling.traced(profiling.trace_path(self.traces, step, self._rank))

    def measured(self) -> Measured:
        """Return how much of the step's passes is communication, and how well the devices were used. Collective."""
        return self._meter.measured(self.monitor.counts["update"].flops)
