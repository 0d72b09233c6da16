"""The private names of torch that training.compat relies on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.training import compat
from gspo_hpc.training.telemetry import collectives
from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.collectives import CollectiveTime, Span
from gspo_hpc.training.telemetry.meter import PHASES, Meter
from tests.sources import missing, require_checked

TORCH = ("2.13.0",)
NAMES = {"torch/_C/_distributed_c10d.pyi: Work.wait": ("self", "timeout")}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A gloo group of this process; afterwards waits are no longer timed."""
    work: Any = dist.Work
    monkeypatch.setattr(work, "wait", work.wait)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_names_of_torch() -> None:
    root = require_checked(["torch"], TORCH, "gspo_hpc/training/compat.py", NAMES)
    assert missing(root, NAMES) == []


@pytest.mark.usefixtures("alone")
def test_every_wait_for_a_collective_is_timed() -> None:
    """Catches a torch whose collectives wait by another method, and a wrapper that loses what it returns."""
    clock = CollectiveTime("cpu")
    tensor = torch.ones(1 << 16)
    began = time.time_ns()

    def seconds() -> float:
        return clock.seconds([Span("update", began, time.time_ns())])["update"]

    seen = [seconds()]
    for collective in (dist.all_reduce, lambda one: dist.broadcast(one, 0), lambda one: dist.all_gather([one], one)):
        collective(tensor)
        seen.append(seconds())
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait() is True
    seen.append(seconds())
    assert seen[0] == 0.0 and sorted(set(seen)) == seen, seen
    ended = [Span("update", began, time.time_ns())]
    dist.all_reduce(tensor)  # between two phases
    assert clock.seconds(ended)["update"] == seen[-1]
    clock.next_step(ended)
    assert clock.seconds([Span("update", time.time_ns(), time.time_ns())])["update"] == 0.0


@pytest.mark.usefixtures("alone")
def test_what_the_thread_of_a_save_waits_for_is_no_time_of_the_loop() -> None:
    """It waits beside a pass, whose communication would be more than the pass takes."""
    clock, tensor, began = CollectiveTime("cpu"), torch.ones(1 << 16), time.time_ns()
    beside = threading.Thread(target=lambda: dist.all_reduce(tensor))
    beside.start()
    beside.join()
    assert clock.seconds([Span("update", began, time.time_ns())])["update"] == 0.0


def record(number: int, created: int, milliseconds: float | None) -> dict[str, Any]:
    """Return a collective as the recorder tells of it; there is no duration until it knows one."""
    return {"record_id": number, "time_created_ns": created} | ({"duration_ms": milliseconds} if milliseconds else {})


def test_a_duration_that_comes_late_counts_where_its_collective_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a reader that takes the newest record for the border of what it has counted."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    known: list[dict[str, Any]] = []
    monkeypatch.setattr(compat, "nccl_records", lambda: known)
    for name in collectives.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    clock = CollectiveTime("cuda")
    first = [Span("update", 100, 200), Span("sync", 200, 300), Span("update", 300, 400)]
    known[:] = [record(0, 50, 9000.0), record(1, 110, 1000.0), record(2, 150, None), record(3, 210, 2000.0)]
    assert clock.seconds(first) == {"update": 1.0, "sync": 2.0}
    known += [record(4, 350, 4000.0), record(5, 399, None)]
    assert clock.seconds(first) == {"update": 5.0, "sync": 2.0}  # asked twice: nothing is lost or counted twice
    clock.next_step(first)
    second = [Span("update", 500, 600)]
    known[2:] = [record(2, 150, 500.0), *known[3:5], record(5, 399, 250.0), record(6, 550, 8000.0)]
    assert clock.seconds(second) == {"update": 8.75, "sync": 0.0}
    clock.next_step(second)
    assert clock.seconds([Span("update", 700, 800)]) == {"update": 0.0}


@pytest.mark.usefixtures("alone")
def test_the_recorder_is_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many phases a step has: a reading copies and parses up to 20,000 records."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in collectives.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    readings: list[int] = []
    steps: list[int] = []

    def records() -> list[dict[str, Any]]:
        readings.append(len(steps))
        return [record(len(readings), time.time_ns(), 1.0)]

    monkeypatch.setattr(compat, "nccl_records", records)
    device = torch.device("cpu")
    meter = Meter(CollectiveTime("cuda"), Accelerator(device), device)
    for _ in range(3):
        meter.begin(watch_memory=False)
        for phase in (*PHASES, *PHASES):
            with meter.phase(phase):
                pass
        steps.append(len(meter.measured(0).shares))
    assert readings == [0, 1, 2]
