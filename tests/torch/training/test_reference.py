"""The reference model's swap, with weights that take themselves for those of a GPU. Milliseconds.

Catches copies through host memory that is not page-locked, which take several times as long, and copies that wait one
by one; weights of the pass that are not the reference's, and weights afterwards that are not the policy's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.training import reference
from gspo_hpc.training.phases import refreshes_reference
from gspo_hpc.training.reference import Reference
from tests.torch.ops.test_host_memory import Runtime


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, and notes what is copied from and to it."""

    copies: ClassVar[list[tuple[torch.Tensor, bool]]] = []  # the other side, and whether the copy waits for nothing

    @property
    def is_cuda(self) -> bool:
        """Say so."""
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as a tensor does."""
        if func is torch.Tensor.copy_:
            (host,) = (one for one in args[:2] if not isinstance(one, OnGpu))
            cls.copies.append((host, bool((kwargs or {}).get("non_blocking"))))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_swap_goes_through_page_locked_memory_and_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, waits = Runtime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waits.append(1)))
    monkeypatch.setattr(OnGpu, "copies", [])
    first = [torch.full((64, 8), 1.0), torch.full((5,), 2.0)]
    weights = [one.clone().as_subclass(OnGpu) for one in first]
    policy: Any = SimpleNamespace(
        trained_parameters=lambda: iter(weights),
        config=from_dict({}),
        settle=lambda: None,
        before_change=lambda: saved.append([one.clone() for one in weights]),
    )
    saved: list[list[torch.Tensor]] = []  # by a save that is under way, before the weights of the reference come
    passes: list[bool] = []

    def logprob_pass(*unused: Any, **options: Any) -> Any:
        passes.append(all(bool((now == then).all()) for now, then in zip(weights, first, strict=True)))
        return SimpleNamespace(logprobs={})

    monkeypatch.setattr(reference, "logprob_pass", logprob_pass)
    monkeypatch.setattr(reference, "with_values", lambda groups, values, change: groups)
    made = Reference(policy)
    groups: Any = object()
    for step in range(2):
        for one in weights:
            one.add_(step + 1.0)
        own = [one.clone() for one in weights]
        assert made.with_logprobs(policy, groups, from_dict({})) is groups
        assert all(bool((now == then).all()) for now, then in zip(weights, own, strict=True))
        assert all(bool((kept == then).all()) for kept, then in zip(saved.pop(), own, strict=True)) and not saved
    assert passes == [True, True]
    assert len(OnGpu.copies) == 2 + 2 * 3 * 2 and len(waits) == 1 + 2 * 3  # of two weights: once, then out, in, back
    for host, at_once in OnGpu.copies:
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        assert at_once and any(low <= begin and end <= low + size for low, size in runtime.locked.items())


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_refresh_moves_the_weights_towards_the_policys(share: float) -> None:
    """Would miss a save under way, whose copy is to be of the weights before, and a mean that is taken in 16 bits."""
    weights = [torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))]
    events: list[str] = []
    policy: Any = SimpleNamespace(
        trained_parameters=lambda: iter(weights),
        config=from_dict({}),
        settle=lambda: events.append("settle"),
        before_change=lambda: events.append(f"saved {made.weights[0].tolist()}"),
    )
    made = Reference(policy)
    with torch.no_grad():
        weights[0].copy_(torch.tensor([1.0078125, 6.0]))  # the next number above 1
    for _ in range(2):
        made.refresh(policy, share)
    expected = [1.0078125, 6.0] if share == 1 else [1.0, 3.75]
    assert made.weights[0].tolist() == expected
    assert events[:2] == ["settle", "saved [1.0, 2.0]"]
    assert weights[0].tolist() == [1.0078125, 6.0]


def test_the_start_of_adapters_is_the_model_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of anything; a reference that moves has copies of what is trained, and of nothing else."""
    events: list[str] = []

    @contextlib.contextmanager
    def without_adapters() -> Iterator[None]:
        events.append("off")
        yield
        events.append("on")

    def policy(interval: int) -> Any:
        return SimpleNamespace(
            trained_parameters=lambda: iter([torch.nn.Parameter(torch.ones(2))]),
            config=from_dict(
                {"adapter": {"type": "lora"}, "algorithm": {"kl_beta": 0.04, "reference_interval": interval}}
            ),
            settle=lambda: None,
            without_adapters=without_adapters,
        )

    def logprob_pass(*unused: Any, **options: Any) -> Any:
        events.append("pass")
        return SimpleNamespace(logprobs={})

    monkeypatch.setattr(reference, "logprob_pass", logprob_pass)
    monkeypatch.setattr(reference, "with_values", lambda groups, values, change: groups)
    fixed = Reference(policy(0))
    fixed.with_logprobs(policy(0), Any, from_dict({}))  # type: ignore[arg-type]
    assert (fixed.weights, events) == ([], ["off", "pass", "on"])
    assert [one.tolist() for one in Reference(policy(2)).weights] == [[1.0, 1.0]]


def test_refreshes_are_due_where_a_rollout_has_reached_a_multiple() -> None:
    due = [step for step in range(4, 41, 4) if refreshes_reference(10, step, 4)]
    assert due == [12, 20, 32, 40]
    assert [step for step in range(2, 9, 2) if refreshes_reference(1, step, 2)] == [2, 4, 6, 8]
    assert not any(refreshes_reference(0, step, 4) for step in range(4, 41, 4))
