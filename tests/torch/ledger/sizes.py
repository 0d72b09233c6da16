"""Sizes of what a job of the planned model allocates, from the code that allocates it and not from the plan.

Buckets are made by the code that gathers weights, from the model's table of parameters; log-probs are computed by the
real function, on tensors without memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_hpc.config import derived
from gspo_hpc.config.constants import (
    GATHER_BUCKET_BYTES,
    LOGITS_BLOCK_BYTES,
    LOGITS_BLOCK_TOKENS,
    TRANSFER_BUCKET_BYTES,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.data.packing import Sample, pack, token_count
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.exchange import wire_format
from gspo_hpc.models.adapter_table import embedding, examples, kinds
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.weight_table import stage_table
from gspo_hpc.ops import logprobs
from gspo_hpc.ops.batch import build, part
from gspo_hpc.ops.weight_map import shard_shape
from gspo_hpc.planning.divisions import layers_of_stage
from gspo_hpc.planning.estimates import moments
from gspo_hpc.policy import weight_stream
from gspo_hpc.policy.adapters import lora
from gspo_hpc.policy.router_replay import RouterReplay, Routing
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


@dataclass(frozen=True)
class Choices:
    """Bytes of choices of experts, with the longest completions: of groups in host memory, and of passes."""

    group: int
    update: int  # in host memory of a rank: what it fetches and packs
    noting: int  # the same of the pass for old log-probs: what it repeats, or notes and takes apart
    given: int  # on a card: of one micro-batch that an update repeats
    kept: bool  # whether a card keeps them for a layer that is computed again
    noted: int  # on a card, of one micro-batch of the pass for old log-probs


def choices(arch: Architecture, config: Config, stage: int) -> Choices:
    """Return what choices take, by the functions that pack samples, send them, and give them to routers."""
    assert arch.experts is not None
    with _ONE_AT_A_TIME:
        return _choices(arch, config, stage)


def _choices(arch: Architecture, config: Config, stage: int) -> Choices:
    rollout, batch, parallel = config.rollout, config.batch, config.parallel
    assert arch.experts is not None and batch.num_generations and batch.global_batch_size
    prompt, length, each = rollout.max_prompt_length, rollout.max_response_length, batch.num_generations
    kind = np.uint8 if arch.experts.count <= 256 else np.uint16
    shape = arch.num_layers, arch.experts.top_k
    completion: Any = np.broadcast_to(np.zeros((), kind), (length - 1, *shape))
    question: Any = np.broadcast_to(np.zeros((), kind), (prompt, *shape))
    one, few = _packed(shape, kind), 8 * parallel.tensor_model_parallel_size * parallel.context_parallel_size
    replays = derived.router_replay(config) == "rollout"
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    replicas = config.world_size // (tp * cp * parallel.pipeline_model_parallel_size)

    def sent(samples: Iterable[Sample]) -> int:
        keys = sorted({(s.slot, s.index) for s in samples} | {(s.slot, -1) for s in samples})
        items = [wire_format.Item(*key, (completion if key[1] >= 0 else question,)) for key in keys]
        return wire_format.payload_bytes(wire_format.header_of(items))

    def dealt(name: str, slots: range) -> list[list[Sample]]:
        size, every = derived.pass_sizes(config)[name], itertools.product(slots, range(each))
        samples = [Sample(slot, index, prompt, length) for slot, index in every]
        counts = {"micro_batch_size": size.micro_batch_size, "micro_batch_tokens": size.micro_batch_tokens}
        return pack(samples, dp_size=replicas, rank=0, share_prompts=batch.share_prompts, **counts).batches

    def packed(batches: list[list[Sample]]) -> int:
        return one * sum(token_count(samples, batch.share_prompts) for samples in batches)

    updates = derived.updates_per_rollout(batch) // batch.num_iterations
    first = batch.global_batch_size // each
    later = dealt("old_logprobs", range(first * (updates - (batch.num_iterations == 1))))
    of_update, fetched = dealt("update", range(first)), sent(itertools.chain(*later))
    layers = [n for n in layers_of_stage(arch.num_layers, parallel, stage) if arch.has_experts(n)]
    routed = _Routed(arch, config, layers, few)
    noting = fetched + packed(later)
    if not replays:  # noted by this rank's routers, joined, and taken apart
        noting = packed(later) + max(packed(later) * routed.on_host // (few * one), fetched)
    most = {name: moments.micro_batch_tokens(config, name) for name in ("update", "old_logprobs")}
    return Choices(
        group=prompt * math.prod(shape) * kind().nbytes + each * completion.nbytes,
        update=sent(itertools.chain(*of_update)) + packed(of_update),
        noting=noting,
        given=routed.given * most["update"] // few,
        kept=routed.kept,
        noted=(routed.given if replays else routed.noted) * most["old_logprobs"] // few,
    )


def _packed(shape: tuple[int, int], kind: type) -> int:
    """Return the bytes of the choices of one token in a micro-batch."""
    rows = np.zeros((2, *shape), kind)
    completion = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), "", "stop", 0, experts=rows)
    group = Group(0, Prompt(0, np.zeros(2, np.int32), "", {}), (completion,), rows)
    experts = build({0: group}, [Sample(0, 0, 2, 3)], share_prompts=True).experts
    assert experts is not None
    return experts.nbytes // len(experts)


class _Routed:
    """Bytes of the choices of a few tokens that the routers of a rank are given, keep, note, and note in host memory.

    All are of a whole micro-batch of so many tokens, which ranks may split.
    """

    def __init__(self, arch: Architecture, config: Config, layers: Sequence[int], tokens: int) -> None:
        assert arch.experts is not None
        memory, parallel = config.memory, config.parallel
        top_k, tp, cp = arch.experts.top_k, parallel.tensor_model_parallel_size, parallel.context_parallel_size
        rows = np.zeros((tokens // 2, arch.num_layers, top_k), np.uint8)
        words = np.zeros(tokens // 2 + 1, np.int32)
        completion = Completion(words, np.zeros(len(words), np.float32), "", "stop", 0, experts=rows)
        group = Group(0, Prompt(0, words[1:], "", {}), (completion,), rows)
        whole = build({0: group}, [Sample(0, 0, tokens // 2, len(words))], share_prompts=True)
        share = (0, tp if parallel.sequence_parallel else 1)
        batch = part(whole, 0, cp, share[1])
        routers = [RouterReplay(4, torch.device("cpu")) for _ in layers]
        chunk: Any = object()
        routing = Routing([(chunk, n, one) for n, one in zip(layers, routers, strict=True)], arch.num_layers, top_k)
        scores = torch.zeros(batch.tokens.numel() // share[1], 4)

        def forward() -> None:
            for router in routers:
                router.get_replay_topk(scores, top_k, None, None, _chosen)

        again = memory.recompute_granularity == "full" or "moe" in memory.recompute_modules
        routing.begin(training=True, recording=False)
        held = []
        for _ in range(2):
            with Storages() as storages, torch.set_grad_enabled(not again):
                routing.set_next(chunk, batch, share, (0, cp))
                forward()
                held.append(storages)
        self.given, self.kept = held[1].bytes, held[0].bytes > 0
        routing.begin(training=False, recording=True)
        blank = dataclasses.replace(batch, experts=None)
        with Storages() as storages, torch.no_grad():
            routing.set_next(chunk, blank, share, (0, cp))
            forward()
            self.noted = storages.bytes
        routing.finish_forward(chunk)
        self.on_host = sum(kept.nbytes for parts in routing._recorded.values() for kept in parts)


def _chosen(scores: torch.Tensor, topk: int, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.new_zeros(len(scores), topk), torch.zeros(len(scores), topk, dtype=torch.int64)


def merging(arch: Architecture, config: Config) -> int:
    """Return the bytes that the functions that merge adapters take, for the weight for which they take most."""
    if config.adapter.type is None:
        return 0
    parallel, rank = config.parallel, config.adapter.rank
    linears = embedding(arch, config.adapter.targets)
    linears += [linear for layer in examples(arch) for linear in kinds(arch, config.adapter.targets, layer)]
    names = {f"{part.module}.weight" for linear in linears for part in linear.parts}
    table = [entry for entry in stage_table(arch, 0, arch.num_layers, True, True) if names.intersection(entry.hf)]
    tp = parallel.tensor_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    dtype, taken = torch.float32 if config.model.dtype == "float32" else torch.bfloat16, []
    with _ONE_AT_A_TIME, FakeTensorMode():
        for entry in table:
            rows, columns = shard_shape(entry, arch, tp if entry.expert is None else etp)
            weight, apart = torch.empty(rows, columns, dtype=dtype), entry.cut == "vocab"
            inputs, outputs = (rows, columns) if apart else (columns, rows)
            a, b = torch.empty(rank, inputs, dtype=dtype), torch.empty(outputs, rank, dtype=dtype)
            with Storages(least=LEAST) as storages:
                if apart:
                    lora.added_to_rows(weight, a, b, 1.0)
                else:
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
