"""Sums over ranks in the order of the ranks, whatever network is between them.

NCCL adds in the order of its rings and trees, which follow the nodes that a job got. With `run.deterministic` every sum
of more than two floating-point numbers goes this way instead: parts travel to the rank that adds them up, one rank
after the other, and the result travels back. That moves as many bytes as a ring, without adding on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_hpc.policy import compat

_CHUNK = 16 << 20  # elements that travel at once
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

Group = dist.ProcessGroup | None


class _Finished:
    """The handle of an operation that is over when it is returned."""

    def wait(self, *args: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def install() -> None:
    """Have torch.distributed and Megatron add in the order of the ranks from now on. May be called twice."""
    if dist.all_reduce is not all_reduce:
        _PLAIN.update({name: getattr(dist, name) for name in _ORDERED})
        for name, function in _ORDERED.items():
            setattr(dist, name, function)
        compat.bind_reduce_scatter(reduce_scatter_tensor)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """All-reduce, adding in the order of the ranks."""
    if not _is_ordered(tensor, op, group):
        return _PLAIN["all_reduce"](tensor, op, group, async_op)
    world = dist.get_world_size(group)
    flat = tensor.contiguous().view(-1)
    for part in flat.split(_CHUNK):
        share = -(-part.numel() // world)
        sent = part.new_zeros(world * share)
        sent[: part.numel()] = part
        mine = _add(_exchange(sent, group).view(world, share), op)
        # Not an all-gather: within Megatron's coalescing manager that would begin at its end only.
        part.copy_(_exchange(mine.repeat(world), group)[: part.numel()])
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))
    return _Finished() if async_op else None


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce-scatter, adding in the order of the ranks."""
    if not _is_ordered(input, op, group):
        return _PLAIN["reduce_scatter_tensor"](output, input, op, group, async_op)
    world = dist.get_world_size(group)
    rows, flat = input.contiguous().view(world, -1), output.view(-1)
    step = max(1, _CHUNK // world)
    for begin in range(0, flat.numel(), step):
        sent = rows[:, begin : begin + step].contiguous()
        flat[begin : begin + step] = _add(_exchange(sent.view(-1), group).view(world, -1), op)
    return _Finished() if async_op else None


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter, adding in rank order."""
    if not _is_ordered(output, op, group):
        return _PLAIN["reduce_scatter"](output, list(input_list), op, group, async_op)
    world, count = dist.get_world_size(group), output.numel()
    received = output.new_empty(world * count)
    sent = torch.cat([one.reshape(-1) for one in input_list])
    sizes = [one.numel() for one in input_list]
    dist.all_to_all_single(received, sent, [count] * world, sizes, group=group)
    output.copy_(_add(received.view(world, count), op).view_as(output))
    return _Finished() if async_op else None


def _is_ordered(tensor: Tensor, op: Any, group: Group) -> bool:
    """Return True for a sum whose result depends on the order: of two numbers it does not."""
    return tensor.is_floating_point() and any(op == one for one in _SUMS) and dist.get_world_size(group) > 2


def _exchange(sent: Tensor, group: Group) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _add(parts: Tensor, op: Any) -> Tensor:
    """Return the sum (or mean) of the rows, one after the other, in fp32 at least."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return (total / len(parts) if op == dist.ReduceOp.AVG else total).to(parts.dtype)


_ORDERED = {
    "all_reduce": all_reduce,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter": reduce_scatter,
}
_PLAIN: dict[str, Any] = {name: getattr(dist, name) for name in _ORDERED}
