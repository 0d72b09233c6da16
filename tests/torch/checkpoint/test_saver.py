"""The thread of a save, where it fails before it writes. Takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.checkpoint import saver


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_thread_that_cannot_begin_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop would wait for ever for a thread that ended without a word."""
    loop_goes_on = threading.Event()

    def begin(device: torch.device) -> None:
        assert loop_goes_on.wait(60)
        raise RuntimeError("no such device")

    monkeypatch.setattr(saver, "_begin", begin)
    monkeypatch.setattr(saver.sharded, "prepare", lambda *arguments, **options: dict)
    ranks = SimpleNamespace(rank=0, timeout=timedelta(seconds=60), device=torch.device("cpu"))
    policy: Any = SimpleNamespace(ranks=ranks)
    one = saver.Saver(policy)
    staging = tmp_path / "staging"
    staging.mkdir()
    one.save(staging, lambda known: None)
    loop_goes_on.set()
    with pytest.raises(RuntimeError, match="no such device"):
        one.wait(20)
    assert not staging.exists()


@pytest.mark.usefixtures("alone")
def test_the_first_save_verifies_what_ranks_hold_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a pass over all tensors of all ranks, and finds a layout that leaves a piece out before it is needed."""
    checks = list[bool]()

    def prepare(*arguments: Any, check: bool, **options: Any) -> Any:
        checks.append(check)
        return dict

    monkeypatch.setattr(saver.sharded, "prepare", prepare)
    ranks = SimpleNamespace(rank=0, timeout=timedelta(seconds=60), device=torch.device("cpu"))
    policy: Any = SimpleNamespace(ranks=ranks)
    one = saver.Saver(policy, background=False)
    for number in range(3):
        staging = tmp_path / f"staging-{number}"
        staging.mkdir()
        one.save(staging, lambda known: None)
        one.wait(20)
    assert checks == [True, False, False]
