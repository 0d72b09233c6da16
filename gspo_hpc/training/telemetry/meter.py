"""The time of a step by phase: computing, communicating, and waiting for other ranks.

A rank that has less to do waits for the others in the next collective. What the rank that waits least spends
in collectives is therefore called communication, and what the others spend beyond that, waiting. Both are exact only
as means over a step: a rank may wait in one collective and be waited for in another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from gspo_hpc.config import constants
from gspo_hpc.system.text import GIB, in_gib
from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.collectives import CollectiveTime, Span

# Phases that this clock measures, in their order: the wait for rewards is a part of generate.
PHASES = ("sync", *(name for name in constants.PHASES if name not in ("sync", "reward_wait")))
COMPUTING = ("old_logprobs", "reference", "update")  # passes over the trainer's weights


@dataclass(frozen=True)
class Share:
    """One phase over all ranks: mean seconds, but of `seconds` and `peak_memory` the most."""

    seconds: float
    computing: float
    communicating: float
    waiting: float
    peak_memory: int  # bytes; 0 where it was not watched: it always is in the update


@dataclass(frozen=True)
class Measured:
    """The measurements of a step, over all ranks."""

    shares: dict[str, Share]  # by phase
    flops_per_second: float | None  # of a rank in the update; None where there was none
    peak_flops: float | None  # that the device could do, by its data sheet
    device_use: float | None  # share of the step in which GPUs were at work
    ranks_computing: tuple[float, ...]  # seconds of each rank in passes over the trainer's weights, without collectives

    def metrics(self) -> dict[str, float]:
        """Return what is logged every step; communication is that of the passes over the trainer's weights."""
        passes = [self.shares[name] for name in COMPUTING if name in self.shares]
        computing = sum(share.computing for share in passes)
        communicating = sum(share.communicating for share in passes)
        found = {
            "seconds/communication": communicating,
            "seconds/waiting": sum(share.waiting for share in passes),
            "communication_over_computation": communicating / computing if computing > 0.0 else 0.0,
        }
        if len(self.ranks_computing) > 1:
            most = max(self.ranks_computing)
            found["seconds/computing"] = computing
            found["seconds/computing_most"] = most
            found["rank_of_most_seconds"] = self.ranks_computing.index(most)
        if "update" in self.shares:
            found["runtime_memory_gib"] = self.shares["update"].peak_memory / GIB
        if self.flops_per_second is not None:
            found["update_tflops"] = self.flops_per_second / 1e12
            if self.peak_flops is not None:
                found["mfu"] = self.flops_per_second / self.peak_flops
        if self.device_use is not None:
            found["device_use"] = self.device_use
        return found

    def table(self, step: int) -> str:
        """Return a table of the phases, for a reader."""
        head = f"{f'step {step}':<14}{'seconds':>9}{'computing':>11}{'communicating':>15}{'waiting':>9}{'peak GiB':>10}"
        lines = [
            f"{name:<14}{one.seconds:>9.3f}{one.computing:>11.3f}{one.communicating:>15.3f}{one.waiting:>9.3f}"
            f"{in_gib(one.peak_memory, 2):>10}"
            for name, one in self.shares.items()
        ]
        return "\n".join([head, *lines])


class Meter:
    """The clock of this rank."""

    def __init__(self, collectives: CollectiveTime, accelerator: Accelerator, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}  # by phase, also by parts of one
        self._collectives, self._accelerator, self._device = collectives, accelerator, device
        self._spans: list[Span] = []
        self._peaks: dict[str, int] = {}
        self._watching = False
        self.device = accelerator.name

    def begin(self, *, watch_memory: bool) -> None:
        """Begin a step: forget the one before."""
        self.seconds.clear()
        self._collectives.next_step(self._spans)
        self._spans.clear()
        self._peaks.clear()
        self._watching = watch_memory

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of this block to the phase."""
        began, stamp = time.monotonic(), time.time_ns()
        watched = self._watching or name == "update"
        if watched:
            self._accelerator.reset_peak()
        try:
            with self._accelerator.named_range(f"gspo_hpc:{name}"), record_function(name):
                yield
        finally:
            self._spans.append(Span(name, stamp, time.time_ns()))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            if watched:
                self._peaks[name] = max(self._peaks.get(name, 0), self._accelerator.peak_memory())

    def measured(self, update_flops: int) -> Measured:
        """Return what was measured since :meth:`begin`, over all ranks. Collective.

        `update_flops`: operations that this rank had to do in the update.
        """
        use = self._accelerator.use()
        blocked = self._collectives.seconds(self._spans)
        rows = [[self.seconds.get(p, 0.0), blocked.get(p, 0.0), self._peaks.get(p, 0)] for p in PHASES]
        rows.append([update_flops, -1.0 if use is None else use, 0.0])
        mine = torch.tensor(rows, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        if len(every) > 1:
            dist.all_gather(every, mine)
        else:
            every = [mine]
        *phases, own = torch.stack(every, 1).cpu()  # [ranks, 3] each
        passes = [one for name, one in zip(PHASES, phases, strict=True) if name in COMPUTING]
        each = torch.stack([one[:, 0] - one[:, 1] for one in passes]).sum(0)
        shares = {}
        for name, (seconds, blocked, peaks) in zip(PHASES, (one.unbind(1) for one in phases), strict=True):
            if float(seconds.max()) > 0.0:
                computing = float((seconds - blocked).mean())
                least, mean = float(blocked.min()), float(blocked.mean())
                shares[name] = Share(float(seconds.max()), computing, least, mean - least, int(peaks.max()))
        operations = float(own[:, 0].mean())  # 0: of a family for which nobody has counted them
        speed = operations / shares["update"].seconds if operations and "update" in shares else None
        busy = float(own[:, 1].mean()) if float(own[:, 1].min()) >= 0.0 else None
        return Measured(shares, speed, self._accelerator.peak_flops, busy, tuple(each.tolist()))
