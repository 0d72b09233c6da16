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
