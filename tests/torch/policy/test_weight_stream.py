"""How shards of some ranks of a group reach all of it on GPUs: a strict imitation of NCCL, in threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.policy import weight_stream


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Nccl:
    """torch.distributed for threads: every rank must bring what the others expect of it, or all of them fail."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier = size, threading.Barrier(size, timeout=10)
        self._given: list[Any] = [None] * size
        self.calls: list[str] = []

    def _exchange(self, rank: int, call: str, mine: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = call, mine.detach().clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        assert {name for name, _ in given} == {call}, "ranks are in different collectives"
        self.calls += [call] * (rank == 0)
        return [tensor for _, tensor in given]

    def all_gather_into_tensor(self, whole: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        """Gather tensors of the same size."""
        found = self._exchange(group.rank(), "all_gather_into_tensor", mine)
        assert len({tensor.numel() for tensor in found}) == 1 and whole.numel() == self._size * mine.numel()
        whole.copy_(torch.cat(found))

    def all_gather(self, rows: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        """Gather tensors of different sizes, which every rank must know."""
        for row, tensor in zip(rows, self._exchange(group.rank(), "all_gather", mine), strict=True):
            assert row.dtype == tensor.dtype and row.shape == tensor.shape and row.is_contiguous()
            row.copy_(tensor)


@pytest.mark.parametrize(
    ("ranks", "call"),
    [(range(4), "all_gather_into_tensor"), *((range(*ends), "all_gather") for ends in ((0, 2), (1, 2), (2, 4)))],
)
def test_shards_of_some_ranks_reach_all_of_their_group(
    ranks: range, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, length = 4, 6
    nccl = Nccl(size)
    monkeypatch.setattr(weight_stream, "dist", nccl)
    shards = torch.randn(size, length)
    found: list[torch.Tensor] = [torch.full((len(ranks), length), -1.0) for _ in range(size)]
    errors: list[Exception] = []

    def gather(rank: int) -> None:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
        whole = found[rank].as_subclass(OnGpu)
        mine = shards[rank].clone().as_subclass(OnGpu)
        if len(ranks) == size:  # which is gathered in place
            mine = whole[rank].copy_(mine)
        try:
            weight_stream._gather(whole, mine, group, ranks)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors, errors
    assert nccl.calls == [call]
    assert all(torch.equal(one, shards[list(ranks)]) for one in found)
