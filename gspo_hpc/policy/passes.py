"""One pass over the model: packed micro-batches through Megatron's own schedule, for every pipeline layout.

A :class:`Pass` has the state of one pass, and gives what the model's routers have counted and recorded in it. A
:class:`PassMonitor` outlives passes: it says when to stop, and counts passes and their operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from gspo_hpc.config.derived import overlaps
from gspo_hpc.models import flops
from gspo_hpc.models.architecture import SUPPORTED
from gspo_hpc.ops.attention import seen_keys
from gspo_hpc.ops.batch import PackedBatch, part
from gspo_hpc.ops.logprobs import token_logprobs
from gspo_hpc.policy import compat
from gspo_hpc.policy.model import PackedGPTModel
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import any_rank
from gspo_hpc.policy.router_replay import Balance
from gspo_hpc.system.progress import mark

_FP8_TILE = 16  # tokens: products in FP8 need dimensions of whole tiles


class Abandoned(Exception):
    """A stop was requested between two micro-batches: all ranks left the pass, and nothing was changed."""


def never() -> bool:
    """Request no stop."""
    return False


@dataclass
class PassCounts:
    """The passes of one name on this rank, and the sizes that they really had."""

    passes: int = 0
    flops: int = 0
    micro_batches: int = 0
    most_completions: int = 0  # in one micro-batch
    most_tokens: int = 0  # computed in one micro-batch


@dataclass
class PassMonitor:
    """The request to stop, and counts of passes by name: those of the config, and "probe"."""

    stop_requested: Callable[[], bool] = never  # asked before every micro-batch
    counts: defaultdict[str, PassCounts] = field(default_factory=lambda: defaultdict(PassCounts))

    def clear(self) -> None:
        """Set all counts to zero."""
        self.counts.clear()

    def count(self, name: str, batches: Sequence[PackedBatch], operations: int) -> None:
        """Count one pass over micro-batches, of `operations` floating-point operations on this rank."""
        counts = self.counts[name]
        counts.passes += 1
        counts.flops += operations
        counts.micro_batches += len(batches)
        counts.most_completions = max(counts.most_completions, *(len(batch.keys) for batch in batches))
        counts.most_tokens = max(counts.most_tokens, *(batch.tokens.numel() for batch in batches))


class Pass:
    """One forward pass, or one forward and backward pass, of this rank's micro-batches; `name` is what it counts as."""

    def __init__(self, policy: Policy, name: str, monitor: PassMonitor | None = None) -> None:
        self._policy, self._name = policy, name
        self._monitor = PassMonitor() if monitor is None else monitor
        self.abandoned = False  # True once this rank skips the rest of the pass
        self._vote: _Vote | None = None  # of the ranks that decide together, begun before the micro-batch before
        self._overlaps = False  # what travels beside this pass

    def run(
        self, forward_step: Any, batches: Sequence[PackedBatch], *, forward_only: bool, record_experts: bool = False
    ) -> list[Any]:
        """Return what Megatron's schedule returns. Collective.

        Raises Abandoned, on all ranks, if one of them left the pass.
        """
        policy = self._policy
        # Gradients and parameters that travel beside a pass wait for every layer of every rank: such a pass is left
        # before it begins, or not at all. Without a backward pass no gradients travel.
        found = overlaps(policy.config)
        self._overlaps = found.param_gather or (found.grad_reduce and not forward_only)
        if self._overlaps and any_rank(self._monitor.stop_requested(), policy.ranks.device):
            raise Abandoned
        both = flops.FORWARD_AND_BACKWARD_FROZEN if policy.has_adapters else flops.FORWARD_AND_BACKWARD
        factor = flops.FORWARD if forward_only else both
        self._monitor.count(self._name, batches, _forward_flops(policy, batches) * factor)
        policy.routing.begin(training=not forward_only, recording=record_experts)
        with compat.known_shapes(*self._received_shapes(batches)):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in policy.chunks] if len(policy.chunks) > 1 else iter(batches),
                model=policy.wrapped,
                num_microbatches=len(batches),
                seq_length=int(self.own_part(batches[0]).tokens.numel()),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        compat.drop_quantized_weights(policy.chunks)
        compat.drop_unused_gradients()
        if any_rank(self.abandoned, policy.ranks.device):
            raise Abandoned
        return results

    def recorded_experts(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return the experts that the pass recorded; see :meth:`Routing.recorded`. Collective."""
        policy = self._policy
        return policy.routing.recorded(batches, policy.token_share, policy.sample_share)

    def balance(self) -> Balance:
        """Return how the pass spread tokens over experts; see :meth:`Routing.balance`. Collective."""
        experts = self._policy.arch.experts
        return Balance({}, {}) if experts is None else self._policy.routing.balance(experts.count)

    def run_stage(self, batch: PackedBatch, wrapped: DistributedDataParallel) -> torch.Tensor:
        """Return this stage's hidden states [T, 1, H] (its part of T with sequence parallelism).

        They are zeros once a stop was requested. A pass is left by going through the rest of Megatron's schedule
        without computing anything: what the stages send each other keeps its order, and no rank waits for one that has
        gone.
        """
        mark("update")
        compat.drop_unused_gradients()  # those of the micro-batch before: the head needs its memory for logits
        policy = self._policy
        if self._abandons():
            return _zeros_like_stage(policy, batch, wrapped.module)
        policy.routing.set_next(wrapped.module, batch, policy.token_share, policy.sample_share)
        hidden: torch.Tensor = wrapped(**wrapped.module.inputs(batch))
        policy.routing.finish_forward(wrapped.module)
        return hidden

    def own_part(self, batch: PackedBatch) -> PackedBatch:
        """Return the part of a micro-batch that this rank computes."""
        policy = self._policy
        return part(batch, *policy.sample_share, policy.token_share[1] * (_FP8_TILE if policy.config.model.fp8 else 1))

    def _received_shapes(self, batches: Sequence[PackedBatch]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of what this stage receives from the previous stage, and of gradients from the next one.

        All stages hold the same micro-batches, so nobody has to send a shape. Micro-batches come in the order in which
        the stage before sends them. In a virtual pipeline the last stage sends back to the first what is not yet at its
        end, and the first sends the gradients of that to the last.
        """
        policy = self._policy
        ranks, chunks = policy.ranks, len(policy.chunks)
        if ranks.pp_size == 1:
            return [], []
        shapes = [_stage_shape(policy.chunks[0], self.own_part(batch)) for batch in batches]
        if chunks == 1:
            every, around = shapes, []
        else:
            group = policy.chunks[0].config.microbatch_group_size_per_vp_stage or ranks.pp_size
            table = get_schedule_table(len(batches), chunks, group)
            every = [shapes[batch] for batch, _ in table]
            around = [shapes[batch] for batch, chunk in table if chunk < chunks - 1]
        return around if ranks.pp_rank == 0 else every, around if ranks.is_last_stage else every

    def _abandons(self) -> bool:
        """Return True if this pass is left.

        Ranks that compute one sample, or with one another's experts, decide together; the others need not, since they
        meet only after the last micro-batch. What was voted on before one micro-batch counts from the next one on: to
        wait for it at once would leave a GPU without work after every micro-batch.
        """
        if self.abandoned or self._overlaps:
            return self.abandoned
        group = self._deciding()
        if group.size() == 1:
            self.abandoned = self._monitor.stop_requested()
        else:
            before, self._vote = self._vote, _Vote(self._monitor.stop_requested(), group, self._policy.ranks.device)
            self.abandoned = before is not None and before.result()
        return self.abandoned

    def _deciding(self) -> dist.ProcessGroup:
        if self._policy.ranks.ep_size > 1:
            return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_tensor_and_context_parallel_group()


class _Vote:
    """A question to a group of ranks, whose answer is true if any of them says so. All make one together."""

    def __init__(self, answer: bool, group: dist.ProcessGroup, device: torch.device) -> None:
        value = torch.tensor([int(answer)], dtype=torch.int32, device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        self._value, self._arrived = value, None
        if device.type == "cuda":  # reading it later would wait for all that the GPU has been given by then
            self._value = torch.empty(1, dtype=torch.int32, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> bool:
        """Return whether any rank said so, once it is known."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value.item())


def head(
    policy: Policy,
    hidden: torch.Tensor,
    batch: PackedBatch,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Return log-probs and entropies [R] of the response tokens, from hidden states [T, 1, H].

    The tokens have been checked, those of all micro-batches at once (:func:`check_targets`). Entropies have a gradient
    only with `entropy_gradient`.
    """
    module = policy.chunks[-1]
    if module.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    selected = hidden[:, 0].index_select(0, batch.head_index)
    weight = module.output_weight()
    tp_size = policy.ranks.tp_size
    return token_logprobs(
        selected,
        weight,
        batch.targets,
        temperature=temperature,
        vocab_start=policy.ranks.tp_rank * weight.shape[0],
        vocab_size=policy.arch.vocab_size,
        tp_group=parallel_state.get_tensor_model_parallel_group() if tp_size > 1 else None,
        with_entropy=True,
        check=False,
        entropy_gradient=entropy_gradient,
    )


def sum_over_context(policy: Policy, values: torch.Tensor) -> torch.Tensor:
    """Return sums over the context-parallel ranks, which hold different tokens of the same samples.

    The gradient goes back to each of them unchanged.
    """
    if policy.ranks.cp_size == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values, group=parallel_state.get_context_parallel_group())


def _zeros_like_stage(policy: Policy, batch: PackedBatch, chunk: PackedGPTModel) -> torch.Tensor:
    """Zeros of the shape that this stage sends on."""
    received = chunk.decoder.input_tensor
    if received is not None:
        return received * 0.0
    shape = _stage_shape(chunk, batch)
    return torch.zeros(shape, dtype=chunk.config.params_dtype, device=batch.tokens.device, requires_grad=True)


def _stage_shape(chunk: PackedGPTModel, batch: PackedBatch) -> list[int]:
    """Return the shape [T, 1, H] of what a stage sends on of this rank's part of a micro-batch.

    Models of mcore-bridge with hyper-connections send all of their residual streams on, as one wide tensor.
    """
    settings = chunk.config
    length = batch.tokens.numel() // (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
    streams = getattr(settings, "hc_count", None) or 1
    if getattr(settings, "enable_hyper_connections", False):
        streams = settings.num_residual_streams
    return [length, 1, streams * settings.hidden_size]


def _forward_flops(policy: Policy, batches: Sequence[PackedBatch]) -> int:
    """Return the operations of this rank's part of a forward pass, if the ranks that share it do equally much.

    It is 0 for a family whose operations nobody has counted.
    """
    ranks = policy.ranks
    if policy.arch.family not in SUPPORTED:
        return 0
    whole = (
        flops.forward(policy.arch, batch.tokens.numel(), seen_keys(batch.segments), batch.targets.numel())
        for batch in batches
        if batch.keys
    )
    return sum(whole) // (ranks.tp_size * ranks.pp_size * ranks.cp_size)
