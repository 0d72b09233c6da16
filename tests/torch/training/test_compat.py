"""The private names of torch that training.compat relies on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.training.telemetry.collectives import CollectiveTime
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
    seen = [clock.seconds]
    for collective in (dist.all_reduce, lambda one: dist.broadcast(one, 0), lambda one: dist.all_gather([one], one)):
        collective(tensor)
        seen.append(clock.seconds)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait() is True
    seen.append(clock.seconds)
    assert seen[0] == 0.0 and sorted(set(seen)) == seen, seen
