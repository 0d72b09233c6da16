"""Sizes of what a job of the planned model allocates, from the code that allocates it and not from the plan.

Buckets are made by the code that gathers weights, from the model's table of parameters; log-probs are computed by the
real function, on tensors without memory.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_hpc.config.constants import (
    GATHER_BUCKET_BYTES,
    LOGITS_BLOCK_BYTES,
    LOGITS_BLOCK_TOKENS,
    TRANSFER_BUCKET_BYTES,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.models.adapter_table import adapted_linears
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import stage_table
from gspo_hpc.ops import logprobs
from gspo_hpc.ops.weight_map import shard_shape
from gspo_hpc.policy import weight_stream
from gspo_hpc.policy.adapters import lora
from tests.storages import Storages
from tests.torch.ledger.card import OnCard, Wide

_ONE_AT_A_TIME = threading.Lock()  # names of modules are replaced, and ranks are threads
ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST = 1 << 20  # bytes: what has one value for each token is left out


@dataclass(frozen=True)
class Travelling:
    """Bytes of a weight sync on one GPU."""

    largest: int  # that are gathered at once
    alone: int  # the same where weights go to no engine: what no ranks share is not gathered then
    shard: int  # of an expert, beside what is gathered piece by piece
    whole: int  # of all weights
    layer: int  # that a worker of vLLM takes to load a layer, beside the one that it computes with


def travelling(arch: Architecture, config: Config) -> Travelling:
    """Return the sizes of a sync: those of the buckets that the trainer really makes."""
    parallel, rollout = config.parallel, config.rollout
    tp = parallel.tensor_model_parallel_size
    sizes = tp, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    items = ITEMS[config.model.dtype], ITEMS[rollout.dtype or config.model.dtype]
    with _ONE_AT_A_TIME:
        return _travelling(arch, *sizes, rollout.tensor_parallel_size, *items)


@functools.lru_cache(maxsize=64)
def _travelling(arch: Architecture, tp: int, ep: int, etp: int, engine: int, item: int, engine_item: int) -> Travelling:
    table = stage_table(arch, 0, arch.num_layers, True, True, ep)

    def group(size: int) -> Any:
        return lambda: SimpleNamespace(size=lambda: size)

    ranks = SimpleNamespace(
        get_expert_model_parallel_world_size=lambda: ep,
        get_tensor_model_parallel_group=group(tp),
        get_expert_tensor_and_model_parallel_group=group(etp * ep),
    )
    most = TRANSFER_BUCKET_BYTES["cuda"]
    with mock.patch.object(weight_stream, "parallel_state", ranks):
        buckets = list(weight_stream._buckets(table, arch, item, min(GATHER_BUCKET_BYTES["cuda"], most), most))
    together: dict[str, int] = {}  # bytes of the tensors that one layer of vLLM is made of
    for entry in table:
        name = entry.name if entry.expert is None else entry.name.partition(".mlp.")[0]
        together[name] = together.get(name, 0) + sum(map(math.prod, entry.shapes)) * engine_item
    experts = {entry.name.partition(".mlp.")[0] for entry in table if entry.expert is not None}
    gathered = max((one.largest * item for one in buckets if one.entries[0].expert is not None), default=0)
    # A layer is loaded beside itself once all of its tensors are there; experts go into it as they come.
    layers = (
        size // engine + (gathered if name in experts else size)
        for name, size in together.items()
        if "norm" not in name
    )
    return Travelling(
        largest=max(one.largest * item for one in buckets),
        alone=max((one.largest * item for one in buckets if one.group.size() > 1), default=0),
        shard=max((one.length * item for one in buckets if len(one.pieces) > 1), default=0),
        whole=sum(sum(map(math.prod, entry.shapes)) for entry in table) * item,
        layer=max(layers),
    )


def merging(arch: Architecture, config: Config) -> int:
    """Return the bytes that the functions that merge adapters take, for the weight for which they take most."""
    if config.adapter.type is None:
        return 0
    parallel, rank = config.parallel, config.adapter.rank
    linears = adapted_linears(arch, config.adapter.targets, 0)
    names = {f"{part.module}.weight" for linear in linears for part in linear.parts}
    table = [entry for entry in stage_table(arch, 0, 1, True, True) if names.intersection(entry.hf)]
    dtype, taken = torch.float32 if config.model.dtype == "float32" else torch.bfloat16, []
    with _ONE_AT_A_TIME, FakeTensorMode():
        for entry in table:
            rows, columns = shard_shape(entry, arch, parallel.tensor_model_parallel_size)
            weight, a = torch.empty(rows, columns, dtype=dtype), torch.empty(rank, columns, dtype=dtype)
            b = torch.empty(rows, rank, dtype=dtype)
            with Storages(least=LEAST) as storages:
                lora.added(weight, lora.product(a, b), 1.0)
            taken.append(storages.peak)
    return max(taken)


class _Counted:
    """An upstream gradient all of whose tokens count; that of tensors without memory cannot be asked."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def nonzero(self) -> torch.Tensor:
        return torch.empty(self._tokens, 1, dtype=torch.int64)

    def index_select(self, dimension: int, index: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(index))


def of_head(tokens: int, hidden: int, rows: int, item: int, *, with_gradient: bool, frozen: bool) -> int:
    """Return the bytes that log-probs and entropies of so many tokens take on a GPU, at the worst moment.

    `rows` is this rank's part of the vocabulary; `frozen` heads have no gradient of their own. Not counted: the hidden
    states that come in.
    """
    with _ONE_AT_A_TIME:
        return _of_head(tokens, hidden, rows, item, with_gradient, frozen)


@functools.lru_cache(maxsize=256)
def _of_head(tokens: int, hidden: int, rows: int, item: int, with_gradient: bool, frozen: bool) -> int:
    dtype = torch.bfloat16 if item == 2 else torch.float32
    context = SimpleNamespace(
        save_for_backward=lambda *tensors: setattr(context, "saved_tensors", tensors),
        mark_non_differentiable=lambda *tensors: None,
        needs_input_grad=(True, not frozen),
    )
    names: dict[str, Any] = {"_Blocks": OnCard, "torch": Wide(computes=False)}
    names["BLOCK_BYTES"] = {"cpu": LOGITS_BLOCK_BYTES["cuda"]}
    names["TOKENS"] = {"cpu": LOGITS_BLOCK_TOKENS["cuda"]}
    with mock.patch.multiple(logprobs, **names), FakeTensorMode(), torch.no_grad():
        states, head = torch.empty(tokens, hidden, dtype=dtype), torch.empty(rows, hidden, dtype=dtype)
        targets = torch.empty(tokens, dtype=torch.int64)
        function: Any = logprobs._TokenLogprobs
        with Storages(least=LEAST) as storages:
            function.forward(context, states, head, targets, 1.0, None, 0, rows, None, True, False)
        if with_gradient:
            with Storages(least=LEAST) as storages:
                function.backward(context, _Counted(tokens))
    return storages.peak
