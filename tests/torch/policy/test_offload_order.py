"""Offloading, in the order of events on a GPU whose stream is behind.

It costs nothing. Catches storages that are emptied while they are still being copied, for then the copy has what an
engine, or torch's next tensor, has written there by the time that the stream comes to it; and memory that torch keeps:
what was freed, and the workspaces of matrix products, 32 MiB for each thread that has made one on an H100.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy import offload
from gspo_hpc.policy.offload import OffloadBuffer
from gspo_hpc.policy.policy import Policy

GIVEN_BACK = ["free workspaces", "empty cache"]  # in this order: the second returns what the first has freed


def note_what_is_given_back(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("free workspaces"), raising=False
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty cache"))


class Storage:
    """GPU memory of a tensor, whose bytes are lost once it is emptied."""

    device = torch.device("cuda", 0)

    def __init__(self, number: int, events: list[str]) -> None:
        self.number, self.size, self._events = number, 64, events

    def nbytes(self) -> int:
        """Return its size."""
        return self.size

    def data_ptr(self) -> int:
        """Return where it begins."""
        return self.number * 4096

    def resize_(self, size: int) -> None:
        """Change its size."""
        self._events.append(f"{self.number} has {size}")
        self.size = size


def test_memory_is_given_up_once_the_stream_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    storages = [Storage(number, events) for number in (1, 2, 3)]
    tensors: list[Any] = [SimpleNamespace(untyped_storage=lambda one=one: one) for one in storages]
    stream = SimpleNamespace(synchronize=lambda: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    note_what_is_given_back(monkeypatch, events)
    made = OffloadBuffer()
    monkeypatch.setattr(made, "_copy", lambda place, storage: events.append(f"copy {storage.number}"))
    assert made.offload(tensors[:2], tensors[2:]) == 3 * 64
    assert events == ["copy 1", "copy 2", "synchronize", "1 has 0", "2 has 0", "3 has 0", *GIVEN_BACK]
    events.clear()
    target = {
        one.number: SimpleNamespace(
            copy_=lambda host, non_blocking, n=one.number: events.append(f"copy {n} from {host}"),
            zero_=lambda n=one.number: events.append(f"zeros {n}"),
        )
        for one in storages
    }
    monkeypatch.setattr(offload, "_bytes", lambda storage: target[storage.number])
    hosts: Any = {0: "place 0", 1: "place 1"}
    made._host = hosts
    made.restore()
    sizes = [f"{number} has 64" for number in (1, 2, 3)]
    assert events == [sizes[0], "copy 1 from place 0", sizes[1], "copy 2 from place 1", sizes[2], "zeros 3"]
    assert not made.is_offloaded


@pytest.mark.parametrize(("mode", "expected"), [("colocate", GIVEN_BACK), ("server", [])])
def test_an_engine_gets_what_torch_keeps_also_where_nothing_is_offloaded(
    mode: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"rollout": {"mode": mode}, "memory": {"offload_trainer": False}}
    raw |= {"cluster": {"platform": "cuda", "gpus_per_node": 2}}
    if mode == "server":
        raw["rollout"] |= {"engines_per_node": 1}
    events: list[str] = []
    note_what_is_given_back(monkeypatch, events)
    monkeypatch.setattr(offload, "barrier", lambda device: events.append("wait for all"))
    ranks = SimpleNamespace(device=torch.device("cuda", 0), world_size=2)
    policy: Any = SimpleNamespace(config=from_dict(raw), ranks=ranks)
    offload.leave_to_engines(policy)
    assert events == [*expected, "wait for all"], "an engine on several GPUs wakes when all ranks have come here"


def test_a_save_under_way_has_its_copy_before_the_state_leaves() -> None:
    """It would be written from storages that are empty, or hold what an engine has written there."""
    events: list[str] = []

    def buffer(name: str) -> Any:
        return SimpleNamespace(is_offloaded=False, offload=lambda *tensors: events.append(name) or 0)

    policy: Any = SimpleNamespace(
        config=from_dict({}),
        before_change=lambda: events.append("copied"),
        parameters=lambda: iter(()),
        gradient_offload=buffer("gradients"),
        weight_offload=buffer("weights"),
        _offload_state=lambda: events.append("optimizer") or 0,
        _gradient_buffers=list,
    )
    Policy.offload(policy)
    assert events == ["copied", "optimizer", "gradients", "weights"]
