"""Sums over ranks in their order: what they give, beside a sum of all parts on one rank."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings

from gspo_hpc.policy.platform import deterministic_collectives


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Have this process add so within the block, as deterministic_collectives.install does for good."""
    modules = [(module, "dist_reduce_scatter_func") for module in (layers, mappings, param_and_grad_buffer)]
    collectives = [(dist, name) for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter")]
    before = [(place, name, getattr(place, name)) for place, name in (*collectives, *modules)]
    deterministic_collectives.install()
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


# Allocations of nodes: the place of each rank. Ranks come to a collective, and their nodes are named, in this order.
PLACES = {"ranked": (0, 1, 2, 3), "reversed": (3, 2, 1, 0), "mixed": (2, 0, 3, 1)}


@contextlib.contextmanager
def placed(place: int) -> Iterator[None]:
    """Have this process be at a place of an allocation within the block: on a node of its own, later than others."""
    node = {"SLURMD_NODENAME": f"node{place}", "HOSTNAME": f"node{place}"}
    numbers = dict.fromkeys(("SLURM_NODEID", "SLURM_LOCALID", "LOCAL_RANK"), str(place))

    def delayed(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            time.sleep(0.02 * place)
            return function(*given, **options)

        return call

    with mock.patch.dict(os.environ, node | numbers), mock.patch.object(socket, "gethostname", lambda: f"node{place}"):
        with contextlib.ExitStack() as stack:
            for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter"):
                late = delayed(getattr(deterministic_collectives, name))
                stack.enter_context(mock.patch.object(deterministic_collectives, name, late))
            yield


def compare(rank: int, world: int) -> list[str]:
    """Return the names of what agrees bit for bit with adding the parts one after the other, in every allocation."""
    agreed = []
    for name, places in PLACES.items():
        with placed(places[rank]):
            agreed += [f"{name}: {one}" for one in _compare(rank, world)]
    return agreed


def _compare(rank: int, world: int) -> list[str]:
    agree = []
    for dtype in (torch.float32, torch.bfloat16):
        with mock.patch.object(deterministic_collectives, "_CHUNK", 100):  # and more than one chunk, with a rest
            for count in (1, 1001):
                parts = [_part(one, count, dtype) for one in range(world)]
                agree += _all_reduce(parts, rank, f"{dtype}-{count}")
            parts = [_part(one, 48 * world, dtype) for one in range(world)]
            agree += _reduce_scatter(parts, rank, world, str(dtype))
    plain, parts = _part(rank, 1001, torch.float32), [_part(one, 1001, torch.float32) for one in range(world)]
    dist.all_reduce(plain)
    agree += ["gloo"] if torch.equal(plain, _sum(parts)) else []
    whole = torch.tensor([rank, 1])
    deterministic_collectives.all_reduce(whole)
    pair: Any = dist.new_group([0, 1])
    of_two = torch.tensor([0.5 + rank])
    if rank < 2:
        deterministic_collectives.all_reduce(of_two, group=pair)
    agree += ["integers"] if whole.tolist() == [sum(range(world)), world] else []
    return agree + (["pair"] if of_two.item() == 2.0 else [])


def _all_reduce(parts: list[torch.Tensor], rank: int, name: str) -> list[str]:
    summed, mean = parts[rank].clone(), parts[rank].clone()
    deterministic_collectives.all_reduce(summed)
    deterministic_collectives.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True).wait()
    strided = torch.stack((parts[rank], parts[rank]), dim=1)[:, 0]
    deterministic_collectives.all_reduce(strided)
    expected, average = _sum(parts), (_sum(parts, exact=True) / len(parts)).to(parts[0].dtype)
    found = {"sum": torch.equal(summed, expected), "mean": torch.equal(mean, average)}
    found["strided"] = torch.equal(strided, expected)
    return [f"{what}-{name}" for what, equal in found.items() if equal]


def _reduce_scatter(parts: list[torch.Tensor], rank: int, world: int, name: str) -> list[str]:
    own = slice(rank * 48, (rank + 1) * 48)
    expected = _sum(parts)
    buffer = parts[rank].clone()
    deterministic_collectives.reduce_scatter_tensor(buffer[own], buffer)  # in place, as Megatron calls it
    sizes = [40 + 4 * place for place in range(world)]
    sizes[-1] += 48 * world - sum(sizes)
    out = parts[rank].new_empty(sizes[rank])
    deterministic_collectives.reduce_scatter(out, list(parts[rank].split(sizes)))
    found = {"scattered": torch.equal(buffer[own], expected[own])}
    found["listed"] = torch.equal(out, expected.split(sizes)[rank])
    return [f"{what}-{name}" for what, equal in found.items() if equal]


def _part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10.0 ** (3 * (rank % 3))).to(dtype)


def _sum(parts: list[torch.Tensor], *, exact: bool = False) -> torch.Tensor:
    total = parts[0].float().clone()
    for part in parts[1:]:
        total = total + part.float()
    return total if exact else total.to(parts[0].dtype)
