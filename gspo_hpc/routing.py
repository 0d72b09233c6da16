"""To which experts tokens go: told to the routers, recorded from them, and counted.

Floor 3. Between a rollout and its updates the same router may choose other experts: the engine computes in another
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_hpc.attention import own_tokens
from gspo_hpc.batch import PackedBatch


class Turn(NamedTuple):
    """One forward pass of a router."""

    tokens: int  # that belong to samples: behind them comes padding
    given: torch.Tensor | None  # [all of them, top_k] int64: the experts they are to go to; -1: as the router chooses


class Choices:
    """What one router is told to choose, and what it chose: in the place of Megatron's RouterReplay, whose actions are
    global, and which knows no token without a choice of its own."""

    def __init__(self, num_experts: int, device: torch.device | int) -> None:
        self.turn = Turn(0, None)  # the next one
        self.recorded: torch.Tensor | None = None  # [tokens, top_k], of the last one, while recording
        self.recording = False
        self.training = False  # whether a turn without gradient will come again with one
        # Since the pass began, of turns with gradient: tokens of each expert, then tokens whose experts were given, and
        # those of them for which the router would have chosen others.
        self.counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=device)
        self._queue: deque[Turn] = deque()

    def begin(self, *, training: bool, recording: bool) -> None:
        """Begin a pass: what one before it has left belongs to nobody."""
        self.turn, self.recorded = Turn(0, None), None
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
        """Scores and experts of each token, both [tokens, topk], from scores [tokens, experts]; called by Megatron."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.recording:
            self.recorded = own
        tokens, given = self._next_turn()
        chosen = own
        if given is not None:
            known = given >= 0
            chosen = torch.where(known, given, own)
            values = scores.gather(1, chosen)
        if self.training and torch.is_grad_enabled():  # once, where the layer is computed again
            self.counts[:-2] += torch.bincount(chosen[:tokens].flatten(), minlength=scores.shape[1])
            if given is not None:
                self.counts[-2] += known[:, 0].sum()
                self.counts[-1] += (chosen.sort(1).values != own.sort(1).values).any(1).sum()
        return values, chosen

    def _next_turn(self) -> Turn:
        if not self.training:
            return self.turn
        if not torch.is_grad_enabled():  # Megatron computes this layer again in the backward pass
            self._queue.append(self.turn)
            return self.turn
        return self._queue.popleft() if self._queue else self.turn


class Routing:
    """The routers of this rank's part of the model: `routers` are (chunk, layer counted from 0, its choices)."""

    def __init__(self, routers: Sequence[tuple[torch.nn.Module, int, Choices]], layers: int, top_k: int) -> None:
        self._routers = routers
        self._shape = (layers, top_k)
        self._recorded: dict[int, list[torch.Tensor]] = {}  # by place in `routers`: of every micro-batch in turn
        self._recording = False

    def begin(self, *, training: bool) -> None:
        """A pass begins. `training`: it has a backward pass."""
        self._recorded.clear()
        for _, _, choices in self._routers:
            choices.begin(training=training, recording=self._recording)

    def give(self, chunk: torch.nn.Module, batch: PackedBatch, share: tuple[int, int], cp: tuple[int, int]) -> None:
        """The next forward pass of `chunk` is that of this rank's part of a micro-batch.

        `share`: (rank, size) of the ranks that split its tokens with sequence parallelism; `cp`: of those that split
        the micro-batch. Raises ValueError where the experts that are given are not those of such a model.
        """
        if not self._routers:
            return
        experts = batch.experts
        if experts is not None and experts.shape[1:] != self._shape:
            raise ValueError(
                f"the experts of {experts.shape[1]} layers were told, {experts.shape[2]} of each token; the model has "
                f"{self._shape[0]} layers and {self._shape[1]} experts of a token"
            )
        length = batch.tokens.numel() // share[1]
        real = len(own_tokens(batch.segments, *cp)) if batch.keys else 0
        tokens = min(max(real - share[0] * length, 0), length)
        mine = None if experts is None else experts.chunk(share[1])[share[0]].long()
        for owner, layer, choices in self._routers:
            if owner is chunk:
                choices.turn = Turn(tokens, None if mine is None else mine[:, layer])

    def taken(self, chunk: torch.nn.Module) -> None:
        """The forward pass of `chunk` is over."""
        if self._recording:
            for place, (owner, _, choices) in enumerate(self._routers):
                if owner is chunk:
                    assert choices.recorded is not None
                    self._recorded.setdefault(place, []).append(choices.recorded)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the routers choose in the pass within this block, for :meth:`recorded`."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def recorded(
        self, batches: Sequence[PackedBatch], share: tuple[int, int], cp: tuple[int, int]
    ) -> list[torch.Tensor]:
        """The experts [T, layers, top_k] int32 of every whole micro-batch of the pass, on every rank that shares it.

        Zeros in layers without experts. `share` and `cp` as in :meth:`give`. Collective.
        """
        groups = [parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]
        if share[1] > 1:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        found = []
        for number, batch in enumerate(batches):
            device = batch.tokens.device
            whole = torch.zeros(batch.tokens.numel(), *self._shape, dtype=torch.int32, device=device)
            own = torch.from_numpy(own_tokens(batch.segments, *cp)).to(device)
            for place, (_, layer, _) in enumerate(self._routers if batch.keys else ()):
                part = self._recorded[place][number].int()
                mine = own[share[0] * len(part) : (share[0] + 1) * len(part)]  # what is behind the end is padding
                whole[mine, layer] = part[: len(mine)]
            for group in groups:
                if group.size() > 1:
                    dist.all_reduce(whole, group=group)
            found.append(whole)
        return found

    def balance(self, num_experts: int) -> dict[str, float]:
        """How tokens were spread over experts in the last pass, over all ranks and layers; nothing without experts.

        Tokens per expert (of one layer): mean, least, most. Imbalance: the most of a layer over its mean, on average
        over layers and of the worst one. Idle: experts that no token went to. Where experts were given: the share of
        tokens (of one layer) for which the router would have chosen others. Collective.
        """
        device = torch.cuda.current_device()
        counts = torch.zeros(self._shape[0], num_experts + 2, dtype=torch.int64, device=device)
        for _, layer, choices in self._routers:
            counts[layer] = choices.counts
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(counts, group=parallel_state.get_pipeline_model_parallel_group())
        replayed, changed = counts[:, -2:].sum(0).tolist()
        tokens = counts[:, :-2]
        tokens = tokens[tokens.sum(1) > 0].double()
        if not len(tokens):
            return {}
        imbalance = tokens.amax(1) / tokens.mean(1)
        moved = {"experts/replay_changed": changed / replayed} if replayed else {}
        return moved | {
            "experts/tokens_mean": float(tokens.mean()),
            "experts/tokens_min": float(tokens.min()),
            "experts/tokens_max": float(tokens.max()),
            "experts/imbalance": float(imbalance.mean()),
            "experts/imbalance_max": float(imbalance.max()),
            "experts/idle": float((tokens == 0).sum()),
        }
