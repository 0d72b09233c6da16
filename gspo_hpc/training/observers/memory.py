"""An observer of a node's memory, which stops the attempt after a step before the kernel ends it within one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.system import host_memory
from gspo_hpc.system.environment import node_name
from gspo_hpc.system.signals import MEMORY
from gspo_hpc.training.observers.base import StepObserver


class MemoryWatch(StepObserver):
    """A request to stop, and so to save, once the memory of this node has grown above `faults.restart_above_memory`.

    `request` is called with the reason. Whoever watches the ranks starts them again. Memory that is above it after the
    first step of an attempt already is what this run needs: a restart would free nothing, and only `warn` is told.
    """

    def __init__(self, config: Config, request: Callable[[str], object], warn: Callable[[str], None]) -> None:
        self._limit, self._last_step = config.faults.restart_above_memory, config.run.max_steps or 0
        self._request, self._warn = request, warn
        self._first = True
        self._watches = self._limit is not None

    def step(self, record: dict[str, Any]) -> None:
        """Measure the memory after a step."""
        step = int(record["step"])
        if not self._watches or self._limit is None or not 0 < step < self._last_step:
            return
        used, first, self._first = host_memory.used(), self._first, False
        if used <= self._limit:
            return
        node = node_name()
        text = f"{used:.0%} of the memory of {node} is in use after step {step}"
        if first:
            self._watches = False
            self._warn(
                f"{text}, the first of this attempt: starting again would free nothing (faults.restart_above_memory "
                f"{self._limit:g})"
            )
        else:
            self._request(f"{MEMORY}: {text} (faults.restart_above_memory {self._limit:g})")
