"""The reference model's swap, with weights that take themselves for those of a GPU. Milliseconds.

Catches copies through host memory that is not page-locked, which take several times as long, and copies that wait one
by one; weights of the pass that are not the reference's, and weights afterwards that are not the policy's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.training import reference
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
    policy: Any = SimpleNamespace(parameters=lambda: iter(weights), settle=lambda: None, before_change=lambda: None)
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
    assert passes == [True, True]
    assert len(OnGpu.copies) == 2 + 2 * 3 * 2 and len(waits) == 1 + 2 * 3  # of two weights: once, then out, in, back
    for host, at_once in OnGpu.copies:
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        assert at_once and any(low <= begin and end <= low + size for low, size in runtime.locked.items())
