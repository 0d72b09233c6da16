"""The ranks of one node that exchange, pack, note and repeat choices of experts, by the package's own code.

Ranks are threads, which exchange over gloo; prompts and completions are as long as the config allows. Replaced are the
model, whose routers choose what their scores say, and groups of ranks that split a sample. Memory is counted by
Python's tracemalloc: that of NumPy's arrays, and that of tensors, which :class:`Tensors` adds. Ranks wait for each
other where one holds most, and what is there then is counted, if it is as large as choices of a prompt are.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from gspo_hpc.algorithms import objective
from gspo_hpc.config.derived import router_replay, updates_per_rollout
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.outputs import reported_experts
from gspo_hpc.exchange.exchange import Exchange, Replicas
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.planning.estimates import engines
from gspo_hpc.policy import router_replay as replays
from gspo_hpc.policy.router_replay import RouterReplay, Routing
from gspo_hpc.training import update
from tests.storages import Storages
from tests.torch.exchange.ranks import on_ranks

_OURS = (str(Path(__file__).resolve().parents[3]), str(Path(np.__file__).parent))
_DOMAIN = 1604  # of tracemalloc, for tensors


class Tensors(Storages):
    """Count tensors with tracemalloc, beside what Python and NumPy allocate."""

    def _take(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        known = storage._cdata in self._known or storage._cdata in before
        super()._take(storage, before)
        if not known and storage._cdata in self._known:
            address = storage.data_ptr()
            ctypes.pythonapi.PyTraceMalloc_Track(_DOMAIN, ctypes.c_size_t(address), ctypes.c_size_t(storage.nbytes()))
            self._addresses[storage._cdata] = address

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[int, int] = {}

    def _free(self, place: int, size: int) -> None:
        super()._free(place, size)
        ctypes.pythonapi.PyTraceMalloc_Untrack(_DOMAIN, ctypes.c_size_t(self._addresses.pop(place)))


class Node:
    """The ranks of a job on one node."""

    def __init__(self, config: Config, layers: int, top_k: int, experts: int) -> None:
        """Take the shapes of a model all of whose layers have experts."""
        self.config, self.layers, self.top_k, self.experts = config, layers, top_k, experts
        self.ranks = config.world_size
        self.peak = 0  # bytes that all ranks held at once at the worst moment
        self._barrier = threading.Barrier(self.ranks, self._count, timeout=60)
        self._least = config.rollout.max_prompt_length * layers * top_k

    def run(self, *, replay: bool = True) -> int:
        """Have the ranks hold, exchange and train on a rollout, and return the peak."""
        self.peak = 0
        tracemalloc.start()
        try:
            with self._aligned():
                on_ranks(self.ranks, lambda link: self._rank(link, replay))
        finally:
            tracemalloc.stop()
        return self.peak

    def _meet(self) -> None:
        """Wait for the other ranks; the last one counts."""
        self._barrier.wait()

    def _count(self) -> None:
        large = (trace for trace in tracemalloc.take_snapshot().traces if trace.size >= self._least)
        ours = (trace.size for trace in large if trace.traceback[0].filename.startswith(_OURS))  # not what is imported
        self.peak = max(self.peak, sum(ours))

    @contextmanager
    def _aligned(self) -> Iterator[None]:
        """Have ranks wait for each other after each micro-batch that is packed or taken apart, and with the results."""

        def then(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                result = real(*arguments, **options)
                self._meet()
                return result

            return call

        alone = SimpleNamespace(size=lambda: 1)
        groups = {f"get_{name}_parallel_group": lambda: alone for name in ("context", "pipeline_model", "tensor_model")}
        with (
            mock.patch.object(update, "build", then(update.build)),
            mock.patch.object(update, "split_experts", then(update.split_experts)),
            mock.patch.object(Exchange, "return_results", then(Exchange.return_results)),
            mock.patch.object(update, "response_logprobs", self._forward),
            mock.patch.object(update, "train_step", self._train),
            mock.patch.object(replays, "parallel_state", SimpleNamespace(**groups)),
        ):
            yield

    def _rank(self, link: Transport, replay: bool) -> None:
        config, parallel = self.config, self.config.parallel
        size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        dp, place = self.ranks // size, link.rank // size
        members = tuple(range(place * size, (place + 1) * size))
        exchange = Exchange(link, Replicas(tuple(range(0, self.ranks, size)), place, members))
        stage = link.rank % size // parallel.tensor_model_parallel_size
        here = self.layers // parallel.pipeline_model_parallel_size
        routers = [RouterReplay(self.experts, torch.device("cpu")) for _ in range(here)]
        chunk: Any = object()
        routing = Routing([(chunk, stage * here + n, one) for n, one in enumerate(routers)], self.layers, self.top_k)
        routing._recorded = _Waiting(self._meet)
        sharers = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        policy: Any = SimpleNamespace(
            ranks=SimpleNamespace(
                exchange=exchange, dp_size=dp, dp_rank=place, device=torch.device("cpu"), pp_size=1, tp_size=1
            ),
            chunks=[chunk],
            routing=routing,
            routers=routers,
            arch=SimpleNamespace(experts=object()),
            share=(0, sharers),
            scheduler=SimpleNamespace(step=lambda steps: None),
        )
        with Tensors():
            groups = exchange.gather_table(self._held(exchange, replay=replay))
            terms = objective.resolve(config.algorithm)
            steps = updates_per_rollout(config.batch)
            if steps > 1:
                first = update.minibatch(groups, config, 0).table.slots if config.batch.num_iterations == 1 else []
                rest = groups.at(groups.table.slots[len(first) :])
                given = config if replay else replace(config, moe=replace(config.moe, router_replay="off"))
                groups = update.with_old_logprobs(policy, groups, rest, given)
                del rest
            for number in range(steps):
                update.step(policy, update.minibatch(groups, config, number), terms, config)

    def _held(self, exchange: Exchange, *, replay: bool) -> list[Group]:
        """Return the groups that a rank holds: its engine's, or in server mode those of the files that it reads."""
        rank, count = exchange.transport.rank, engines.count(self.config)
        if self.config.rollout.mode == "server":
            own, _ = exchange.partition_files(
                lambda: [str(engine) for engine in range(count)],
                lambda name: {group.slot: group for group in self._sampled(int(name), count, replay=replay)},
            )
            return list(own.values())
        engine, rest = divmod(rank, self.config.rollout.tensor_parallel_size)
        return [] if rest else self._sampled(engine, count, replay=replay)

    def _sampled(self, engine: int, engines: int, *, replay: bool) -> list[Group]:
        """Return an engine's groups as its process reports them, with experts if it has to."""
        config, rollout = self.config, self.config.rollout
        each = config.batch.num_generations or 1
        prompt, length = rollout.max_prompt_length, rollout.max_response_length
        wanted = replay and router_replay(config) == "rollout"
        sampled = (config.batch.global_batch_size or 0) * (config.batch.steps_per_generation or 1) // each
        groups = []
        for slot in range((engine + 1) % engines, sampled, engines):  # another replica computes it
            of_prompt, completions = None, []
            for index in range(each):
                experts = None
                if wanted:
                    kind = np.uint8 if self.experts <= 256 else np.uint16
                    rows = np.zeros((prompt + length - 1, self.layers, self.top_k), kind)
                    found = reported_experts(SimpleNamespace(routed_experts=rows, token_ids=range(length)), prompt)
                    answer = pickle.loads(pickle.dumps((found[0] if index == 0 else None, found[1])))
                    of_prompt, experts = answer[0] if index == 0 else of_prompt, answer[1]
                tokens, values = np.zeros(length, np.int32), np.zeros(length, np.float32)
                completions.append(
                    Completion(tokens, values, "", "length", index, advantage=1.0 - 2 * (index % 2), experts=experts)
                )
            question = Prompt(slot, np.zeros(prompt, np.int32), "", {})
            groups.append(Group(slot, question, tuple(completions), of_prompt))
        return groups

    def _forward(self, policy: Any, batches: Sequence[PackedBatch], *unused: Any, **options: Any) -> Any:
        """Go forward through all routers, as response_logprobs does."""
        record, routing = options.get("record_experts", False), policy.routing
        routing.begin(training=False, recording=record)
        for batch in batches:
            self._route(policy, batch)
        values = [torch.zeros(batch.targets.numel()) for batch in batches]
        return SimpleNamespace(
            logprobs=values, entropies=values, experts=routing.recorded(batches, policy.share, (0, 1)) if record else []
        )

    def _train(self, policy: Any, batches: Sequence[PackedBatch], *unused: Any, **options: Any) -> Any:
        policy.routing.begin(training=True, recording=False)
        for batch in batches:
            self._route(policy, batch)
        return update.StepResult({}, {}, {}, 1.0, False, False, 1e-6)

    def _route(self, policy: Any, batch: PackedBatch) -> None:
        (chunk,) = policy.chunks
        tokens = math.ceil(batch.tokens.numel() / policy.share[1])
        with torch.no_grad(), _disable_current_modes():  # what is on a GPU is not the node's
            policy.routing.set_next(chunk, batch, policy.share, (0, 1))
            for router in policy.routers:
                router.get_replay_topk(torch.zeros(tokens, self.experts), self.top_k, None, None, _last)
        policy.routing.finish_forward(chunk)


class _Waiting(dict[int, list[torch.Tensor]]):
    """Choices that routers have noted, which ranks let go of together."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self._meet = meet

    def clear(self) -> None:
        """Wait for the others first, if there is anything."""
        if self:
            self._meet()
        super().clear()


def _last(scores: torch.Tensor, topk: int, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and numbers of experts, always the last one's."""
    return scores[:, :topk], torch.full((len(scores), topk), scores.shape[1] - 1)
