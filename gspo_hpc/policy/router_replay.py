"""Router replay: the experts that tokens go to are given to the routers, recorded from them, and counted.

Between a rollout and its updates the same router may choose other experts: the engine computes in another
order or precision, and from the second update on the weights are not those that sampled. Then ratios compare two
different networks. Replayed, a token goes to the experts it went to before, and only their weights are new: the
gradient goes through the scores of the chosen ("rollout routing replay" where the engine chose, arXiv:2510.11370).

Choices travel with a micro-batch (``PackedBatch.experts``) and are given to each router before the forward pass, as
positions are to the rotary embedding. A layer that is computed again for its gradient needs those of the micro-batch
that it computed first, while others may have gone forward since: it keeps them in a queue, which backward passes empty
in the order in which forward passes filled it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_hpc.ops.attention import own_tokens
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.ops.host_memory import HostMemory

_BLOCK_BYTES = 16 << 20  # of page-locked memory: a rank notes a hundred megabytes in a pass, and `plan` counts no more


class RouterInput(NamedTuple):
    """The input of one forward pass of a router."""

    tokens: int  # that belong to samples: behind them comes padding
    given: torch.Tensor | None  # [all tokens, top_k] int16: the experts they must go to; -1: as the router chooses


class RouterReplay:
    """The experts that one router must choose, and those it chose.

    It stands in the place of Megatron's RouterReplay, whose actions are global, and which cannot let a router choose
    for single tokens.
    """

    def __init__(self, num_experts: int, device: torch.device | int) -> None:
        self.next_input = RouterInput(0, None)
        self.recorded: torch.Tensor | None = None  # [tokens, top_k], of the last one, while recording
        self.recording = False
        self.training = False  # True if a forward pass without gradient is repeated with one
        # Counts since the pass began, of forward passes with gradient: tokens of each expert, then tokens whose experts
        # were given, and those of them for which the router would have chosen others.
        self.counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=device)
        self._queue: deque[RouterInput] = deque()

    def begin(self, *, training: bool, recording: bool) -> None:
        """Begin a pass, and forget what one before it has left."""
        self.next_input, self.recorded = RouterInput(0, None), None
        self.training, self.recording = training, recording
        self.counts.zero_()
        self._queue.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts of each token, both [tokens, topk], from scores [tokens, experts].

        Megatron calls it.
        """
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.recording:
            self.recorded = own
        tokens, given = self._take_input()
        chosen = own
        if given is not None:
            known = given >= 0
            chosen = torch.where(known, given.long(), own)
            values = scores.gather(1, chosen)
        if self.training and torch.is_grad_enabled():  # once, where the layer is computed again
            flat = chosen[:tokens].flatten()
            self.counts[:-2].scatter_add_(0, flat, torch.ones_like(flat))  # torch.bincount reads its result's size
            if given is not None:
                self.counts[-2] += known[:, 0].sum()
                self.counts[-1] += (chosen.sort(1).values != own.sort(1).values).any(1).sum()
        return values, chosen

    def _take_input(self) -> RouterInput:
        if not self.training:
            return self.next_input
        if not torch.is_grad_enabled():  # Megatron computes this layer again in the backward pass
            self._queue.append(self.next_input)
            return self.next_input
        return self._queue.popleft() if self._queue else self.next_input


@dataclass(frozen=True)
class Balance:
    """The spread of a pass's tokens over experts."""

    metrics: dict[str, float]  # over all layers
    tokens: dict[int, list[int]]  # of each expert, by layer


class Routing:
    """The routers of this rank's part of the model: `routers` are (chunk, layer counted from 0, its replay)."""

    def __init__(self, routers: Sequence[tuple[torch.nn.Module, int, RouterReplay]], layers: int, top_k: int) -> None:
        self._routers = routers
        self._shape = (layers, top_k)
        # In host memory, by place in `routers`: the experts [tokens, top_k] int16 of every micro-batch in turn.
        self._recorded: dict[int, list[torch.Tensor]] = {}
        self._memory = HostMemory(_BLOCK_BYTES)  # of a pass
        self._recording = False  # in the pass under way

    def begin(self, *, training: bool, recording: bool) -> None:
        """Begin a pass: one with a backward pass if `training`, one for :meth:`recorded` if `recording`."""
        self._recorded.clear()
        self._memory = HostMemory(_BLOCK_BYTES)
        self._recording = recording
        for _, _, replay in self._routers:
            replay.begin(training=training, recording=recording)

    def set_next(self, chunk: torch.nn.Module, batch: PackedBatch, share: tuple[int, int], cp: tuple[int, int]) -> None:
        """Prepare the next forward pass of `chunk`, which is that of this rank's part of a micro-batch.

        `share`: (rank, size) among the ranks that split its tokens with sequence parallelism; `cp`: among those that
        split the micro-batch. Raises ValueError if the given experts do not fit the model.
        """
        if not self._routers:
            return
        experts = batch.experts
        if experts is not None and experts.shape[1:] != self._shape:
            raise ValueError(
                f"the experts of {experts.shape[1]} layers were given, {experts.shape[2]} of each token; the model has "
                f"{self._shape[0]} layers and {self._shape[1]} experts of a token"
            )
        length = batch.tokens.numel() // share[1]
        real = len(own_tokens(batch.segments, *cp)) if batch.keys else 0
        tokens = min(max(real - share[0] * length, 0), length)
        here = [(layer, replay) for owner, layer, replay in self._routers if owner is chunk]
        mine = None
        if experts is not None and here:
            rows = experts.chunk(share[1])[share[0]]
            mine = _brought(rows[:, [layer for layer, _ in here]].transpose(0, 1), batch.tokens.device)
        for place, (_, replay) in enumerate(here):
            replay.next_input = RouterInput(tokens, None if mine is None else mine[place])

    def finish_forward(self, chunk: torch.nn.Module) -> None:
        """Keep what the routers chose in the forward pass of `chunk` that is over, if the pass is recorded.

        It goes to host memory at once: of all micro-batches together it would take gigabytes of a GPU.
        """
        if not self._recording:
            return
        for place, (owner, _, replay) in enumerate(self._routers):
            if owner is chunk:
                chosen, replay.recorded = replay.recorded, None
                assert chosen is not None
                kept = self._memory.empty(chosen.shape, torch.int16, locked=chosen.is_cuda)
                self._recorded.setdefault(place, []).append(kept.copy_(chosen.short(), non_blocking=True))

    def recorded(
        self, batches: Sequence[PackedBatch], share: tuple[int, int], cp: tuple[int, int]
    ) -> list[torch.Tensor]:
        """Return the experts [T, layers, top_k] int16 of every whole micro-batch, on every rank that shares it.

        They are in host memory, and those of the newest pass, with zeros in layers without experts. `share` and `cp`
        are as in :meth:`set_next`. Collective.
        """
        groups = [parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]
        if share[1] > 1:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        sharing = [group for group in groups if group.size() > 1]
        if batches and batches[0].tokens.is_cuda:
            torch.cuda.current_stream().synchronize()  # what was recorded has arrived then
        found = []
        for number, batch in enumerate(batches):
            device = batch.tokens.device if sharing else torch.device("cpu")
            kind = torch.int32 if sharing else torch.int16  # as sums can be made of
            whole = torch.zeros(batch.tokens.numel(), *self._shape, dtype=kind, device=device)
            own = torch.from_numpy(own_tokens(batch.segments, *cp)).to(device)
            for place, (_, layer, _) in enumerate(self._routers if batch.keys else ()):
                part = self._recorded[place][number].to(device, kind)
                mine = own[share[0] * len(part) : (share[0] + 1) * len(part)]  # what is behind the end is padding
                whole[mine, layer] = part[: len(mine)]
            for group in sharing:
                dist.all_reduce(whole, group=group)
            found.append(whole.short().cpu())
        self._recorded.clear()
        self._memory = HostMemory(_BLOCK_BYTES)  # what was locked of it is free for others
        return found

    def balance(self, num_experts: int) -> Balance:
        """Return how the last pass spread tokens over experts, over all ranks and layers; nothing without experts.

        Tokens per expert (of one layer): mean, least, most. Imbalance: the most of a layer over its mean, on average
        over layers and of the worst one. Idle: experts that no token went to. Where experts were given: the share of
        tokens (of one layer) for which the router would have chosen others. Collective.
        """
        device = torch.cuda.current_device()
        counts = torch.zeros(self._shape[0], num_experts + 2, dtype=torch.int64, device=device)
        for _, layer, replay in self._routers:
            counts[layer] = replay.counts
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(counts, group=parallel_state.get_pipeline_model_parallel_group())
        replayed, changed = counts[:, -2:].sum(0).tolist()
        by_layer = {layer: row for layer, row in enumerate(counts[:, :-2].tolist()) if any(row)}
        tokens = torch.tensor(list(by_layer.values()), dtype=torch.float64)
        if not by_layer:
            return Balance({}, {})
        imbalance = tokens.amax(1) / tokens.mean(1)
        moved = {"experts/replay_changed": changed / replayed} if replayed else {}
        return Balance(
            moved
            | {
                "experts/tokens_mean": float(tokens.mean()),
                "experts/tokens_min": float(tokens.min()),
                "experts/tokens_max": float(tokens.max()),
                "experts/imbalance": float(imbalance.mean()),
                "experts/imbalance_max": float(imbalance.max()),
                "experts/idle": float((tokens == 0).sum()),
            },
            by_layer,
        )


def _brought(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what is in host memory on `device`, without a wait for what the GPU has to do before."""
    if device.type != "cuda":
        return values
    return values.contiguous().pin_memory().to(device, non_blocking=True)
