"""The matrices of adapters by name: their first values, and whole ones put together from what ranks have.

Shapes: whole matrices are A [rank, inputs] and B [outputs, rank], whatever ranks have of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_hpc.config.schema import Adapter
from gspo_hpc.models.adapter_table import AdapterPart, embedding, every_linear, is_of_embedding
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.policy.adapters.lora import Lora, layer_numbers, of_weights_in_order, owner


def of_chunks(chunks: Sequence[Any]) -> Iterator[tuple[str, Lora, AdapterPart, str]]:
    """Yield (name, module, part, "a" or "b") of each matrix on this rank; the name is Hugging Face's of its layer."""
    for chunk in chunks:
        for lora in of_weights_in_order(chunk):
            for part in lora.parts:
                for which in "ab":
                    yield f"{part.module}.lora_{which.upper()}", lora, part, which


@torch.no_grad()
def fill(chunks: Sequence[Any], values: Callable[[str, tuple[int, int]], torch.Tensor]) -> None:
    """Set every matrix on this rank to its part of `values`, called with the name and the shape of the whole one."""
    for name, lora, part, which in of_chunks(chunks):
        whole = values(name, lora.shape(part, which))
        lora.matrix(part, which).copy_(lora.local(whole, which))


def first_values(seed: int) -> Callable[[str, tuple[int, int]], torch.Tensor]:
    """Return the values that a run begins with: A as `peft` draws it (Kaiming, uniform, a = sqrt(5)), B as zeros.

    Of the embedding A is zeros, and B drawn from a normal distribution, as `peft` has it. Values depend on the seed and
    on the name of the layer, and on nothing else.
    """

    def values(name: str, shape: tuple[int, int]) -> torch.Tensor:
        of_embedding = is_of_embedding(name)
        if name.endswith("lora_A" if of_embedding else "lora_B"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if of_embedding:
            return torch.empty(shape).normal_(generator=generator)
        bound = 1.0 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return values


@torch.no_grad()
def whole_matrices(
    chunks: Sequence[Any], arch: Architecture, adapter: Adapter, value: Callable[[torch.nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole matrix in fp32) of all adapters, in the order of layers, on every rank. Collective.

    That of the embedding comes first.

    `value` returns what is wanted of a parameter, in its shape, such as itself or its gradient.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    owners = parallel_state.get_expert_model_parallel_group()
    mine = {name: (lora, part, which) for name, lora, part, which in of_chunks(chunks)}
    first = next(parameter for chunk in chunks for parameter in chunk.parameters())
    holders = _holders(chunks, arch.num_layers, stages, first.device)
    every = [(0, linear) for linear in embedding(arch, adapter.targets)]  # on the first stage
    for layer, holder in enumerate(holders):
        every += [(holder, linear) for linear in every_linear(arch, adapter.targets, layer)]
    for holder, linear in every:
        for part, which in ((part, which) for part in linear.parts for which in "ab"):
            name = f"{part.module}.lora_{which.upper()}"
            shape = (adapter.rank, part.inputs) if which == "a" else (part.outputs, adapter.rank)
            whole: torch.Tensor | None = None
            if name in mine:
                lora, own, _ = mine[name]
                shard = value(lora.matrix(own, which)).detach().float()
                whole = _gathered(shard, lora.cut_dim(which), _sharers(lora))
                whole = whole[:, : shape[1]].contiguous()  # without what fills up a vocabulary
            if linear.expert is not None and holder == stages.rank():
                whole = _sent(whole, shape, owner(arch, linear.expert), owners, first.device)
            whole = _sent(whole, shape, holder, stages, first.device)
            assert tuple(whole.shape) == shape, name
            yield name, whole


def _sent(
    whole: torch.Tensor | None, shape: tuple[int, int], source: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Return a matrix that rank `source` of the group has, on all of the group."""
    if group.size() > 1:
        whole = torch.empty(shape, device=device) if whole is None else whole
        dist.broadcast(whole, dist.get_process_group_ranks(group)[source], group=group)
    assert whole is not None
    return whole


def _sharers(lora: Lora) -> dist.ProcessGroup:
    """Return the ranks over which a layer's matrices are cut."""
    if lora.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gathered(shard: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole of a matrix that the ranks of the group have parts of, or have whole."""
    if dim is None or group.size() == 1:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim)


def _holders(chunks: Sequence[Any], layers: int, stages: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the pipeline rank that has each layer of the model. Collective over the stages."""
    found = torch.zeros(layers, dtype=torch.int64, device=device)
    for chunk in chunks:
        numbers = layer_numbers(chunk)
        found[numbers.start : numbers.stop] = stages.rank()
    if stages.size() > 1:
        dist.all_reduce(found, group=stages)
    return [int(one) for one in found.tolist()]
