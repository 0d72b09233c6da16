"""The two things that are done with packed micro-batches: log-probs without gradient, and one optimizer step.

Floor 3. Both run on Megatron's own schedule (``get_forward_backward_func``), so they hold for every pipeline layout.

The scaling identity
--------------------
Wanted is the gradient of ``L = (1/N) sum_i L_i`` over the N samples of a global batch (N tokens when the objective
aggregates by token). Data-parallel rank r has M micro-batches; its micro-batch m returns ::

    l[r, m] = (dp * M / N) * sum of L_i over the samples i in (r, m)

Megatron's schedule multiplies a two-valued loss by ``cp`` and divides it by ``M``; its DDP averages gradients over
``dp * cp`` ranks. The context-parallel ranks of one sample hold parts of one and the same loss, so their gradients add
up to one, and ::

    (1 / (dp * cp)) * sum_r sum_cp sum_m (cp / M) * grad l[r, m]  =  (1/N) sum_i grad L_i

which does not depend on how samples are dealt to ranks and micro-batches. ``tests/gloo`` holds this to be true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from gspo_hpc import flops
from gspo_hpc.algorithms import Objective
from gspo_hpc.attention import seen_keys
from gspo_hpc.batch import PackedBatch, part
from gspo_hpc.batch import build as pack
from gspo_hpc.control import mark
from gspo_hpc.logprobs import token_logprobs
from gspo_hpc.loss import MAX_NAMES, SUM_NAMES, policy_loss
from gspo_hpc.model import PackedGPTModel
from gspo_hpc.model_config import SUPPORTED
from gspo_hpc.policy import Policy
from gspo_hpc.process_groups import any_rank


class Abandoned(Exception):
    """A stop was asked for between two micro-batches: the pass was left, on all ranks, with nothing changed."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. Sums and maxima are over the whole global batch, equal on all ranks."""

    sums: dict[str, tuple[float, float]]  # name -> (sum, count)
    maxima: dict[str, float]
    experts: dict[str, float]  # how tokens were spread over them; empty without
    grad_norm: float
    skipped: bool  # the gradient was not finite; nothing was changed
    overflowed: bool  # it was, and in float16 the loss will be scaled less from now on: nothing to worry about
    learning_rate: float
    packing: dict[str, float] = field(default_factory=dict)  # how evenly tokens were dealt to ranks and micro-batches


def _head(policy: Policy, hidden: torch.Tensor, batch: PackedBatch, temperature: float) -> tuple[Any, Any]:
    """Log-probs and entropies [R] of the response tokens, from hidden states [T, 1, H]."""
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
    )


def _run_stage(policy: Policy, batch: PackedBatch, wrapped: DistributedDataParallel) -> torch.Tensor:
    """Hidden states [T, 1, H] of this stage (its part of T with sequence parallelism); zeros once a stop was asked for.

    A pass is left by going through the rest of Megatron's schedule without computing anything: what the stages send
    each other keeps its order, and no rank waits for one that has gone.
    """
    mark("update")
    if _abandons(policy):
        return _stand_in(policy, batch, wrapped.module)
    policy.routing.give(wrapped.module, batch, policy.token_share, policy.sample_share)
    hidden: torch.Tensor = wrapped(**wrapped.module.inputs(batch))
    policy.routing.taken(wrapped.module)
    return hidden


def _abandons(policy: Policy) -> bool:
    """Whether this pass is left. Ranks that compute one sample, or with one another's experts, decide together; the
    others need not, since they meet only after the last micro-batch."""
    if not policy.abandons:
        policy.abandons = policy.stop_requested()
        if policy.ranks.ep_size > 1:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        else:
            group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            value = torch.tensor([int(policy.abandons)], dtype=torch.int32, device=policy.ranks.device)
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
            policy.abandons = bool(value.item())
    return policy.abandons


def _stand_in(policy: Policy, batch: PackedBatch, chunk: PackedGPTModel) -> torch.Tensor:
    received = chunk.decoder.input_tensor
    if received is not None:
        return received * 0.0
    settings = chunk.config
    length = batch.tokens.numel() // (policy.ranks.tp_size if settings.sequence_parallel else 1)
    shape = (length, 1, settings.hidden_size)
    return torch.zeros(shape, dtype=settings.params_dtype, device=batch.tokens.device, requires_grad=True)


def _schedule(policy: Policy, forward_step: Any, batches: Sequence[PackedBatch], forward_only: bool) -> list[Any]:
    """What Megatron's schedule returns. Raises Abandoned, on all ranks, if one of them left the pass."""
    kind = "logprobs" if forward_only else "update"
    policy.passes[kind] += 1
    policy.flops[kind] += _flops(policy, batches) * (flops.FORWARD if forward_only else flops.FORWARD_AND_BACKWARD)
    policy.abandons = False
    policy.routing.begin(training=not forward_only)
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in policy.chunks] if len(policy.chunks) > 1 else iter(batches),
        model=policy.wrapped,
        num_microbatches=len(batches),
        seq_length=int(_part(policy, batches[0]).tokens.numel()),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if any_rank(policy.abandons, policy.ranks.device):
        raise Abandoned
    return results


def _flops(policy: Policy, batches: Sequence[PackedBatch]) -> int:
    """Operations of this rank's part of a forward pass, if the ranks that share it do equally much; 0 for a family for
    which nobody has counted them."""
    ranks = policy.ranks
    if policy.arch.family not in SUPPORTED:
        return 0
    whole = (
        flops.forward(policy.arch, batch.tokens.numel(), seen_keys(batch.segments), batch.targets.numel())
        for batch in batches
        if batch.keys
    )
    return sum(whole) // (ranks.tp_size * ranks.pp_size * ranks.cp_size)


def _part(policy: Policy, batch: PackedBatch) -> PackedBatch:
    """What this rank computes of a micro-batch."""
    # Products in FP8 want dimensions of whole tiles.
    return part(batch, *policy.sample_share, policy.token_share[1] * (16 if policy.config.model.fp8 else 1))


def _over_cp(policy: Policy, values: torch.Tensor) -> torch.Tensor:
    """Sums over the context-parallel ranks, which hold different tokens of the same samples; the gradient goes back to
    each of them unchanged."""
    if policy.ranks.cp_size == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values, group=parallel_state.get_context_parallel_group())


@torch.no_grad()
def response_logprobs(policy: Policy, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
    """Log-probs [R] of every micro-batch's response tokens under the current weights, on every rank of the pipeline."""

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        whole = next(iterator)
        batch = _part(policy, whole)
        hidden = _run_stage(policy, batch, model)

        def collect(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if policy.abandons:
                return output.new_zeros(()), output
            logprobs, _ = _head(policy, output, batch, temperature)
            if batch.responses is not None:
                logprobs = logprobs.new_zeros(whole.targets.numel()).index_copy(0, batch.responses, logprobs)
            return output.new_zeros(()), _over_cp(policy, logprobs)

        return hidden, collect

    policy.settle()
    wanted, batches = len(batches), _filled(policy, batches)
    for wrapped in policy.wrapped:
        wrapped.eval()
    try:
        results = _schedule(policy, forward_step, batches, forward_only=True)
    finally:
        for wrapped in policy.wrapped:
            wrapped.train()
    if policy.ranks.pp_size > 1:
        if not policy.ranks.is_last_stage:
            results = [torch.empty(b.targets.numel(), dtype=torch.float32, device=b.tokens.device) for b in batches]
        group = parallel_state.get_pipeline_model_parallel_group()
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        for result in results:
            if result.numel():
                dist.broadcast(result, source, group=group)
    return results[:wanted]


def _filled(policy: Policy, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """As many as the schedule of a virtual pipeline wants: empty ones behind the others."""
    missing = -len(batches) % (policy.ranks.pp_size if len(policy.chunks) > 1 else 1)
    return [*batches, *(pack({}, [], share_prompts=False).to(policy.ranks.device) for _ in range(missing))]


def train_step(
    policy: Policy,
    batches: Sequence[PackedBatch],
    objective: Objective,
    denominator: float,
    temperature: float,
) -> StepResult:
    """One optimizer step on this rank's micro-batches of a global batch.

    `denominator` is N of the scaling identity: samples (or tokens) of the global batch that count.
    """
    policy.fetch_for_update()
    for wrapped in policy.wrapped:
        wrapped.zero_grad_buffer()
    policy.optimizer.zero_grad()
    per_microbatch = denominator / (policy.ranks.dp_size * len(batches))

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = _part(policy, next(iterator))
        hidden = _run_stage(policy, batch, model)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if policy.abandons:
                return output.sum() * 0.0, None
            logprobs, entropy = _head(policy, output, batch, temperature)
            result = policy_loss(
                logprobs, batch, objective, denominator=per_microbatch, cp_reduce=lambda x: _over_cp(policy, x)
            )
            sums = dict(result.sums)
            masked = torch.where(batch.loss_mask, entropy, 0.0)
            entropies = torch.stack((masked.sum(), batch.loss_mask.sum().to(masked.dtype)))
            sums["entropy"] = _over_cp(policy, entropies.detach())
            # An empty micro-batch still runs backward: its ranks take part in the collectives.
            total = result.loss + output.sum() * 0.0
            sums["loss"] = torch.stack((result.loss.detach() * per_microbatch, result.loss.new_zeros(())))
            return total, (sums, result.maxima)

        return hidden, loss

    parts = _schedule(policy, forward_step, batches, forward_only=False)
    scale = float(policy.optimizer.get_loss_scale())
    grad_norm, skipped = _apply(policy)
    overflowed = skipped and policy.config.model.dtype == "float16" and scale > 1.0
    rate = float(policy.optimizer.param_groups[0]["lr"])
    if not skipped:
        policy.scheduler.step(1)
    sums, maxima = _reduce(policy, parts)
    loss_sum, _ = sums.pop("loss", (0.0, 0.0))
    sums["loss"] = (loss_sum, denominator)
    return StepResult(sums, maxima, _balance(policy), grad_norm, skipped, overflowed, rate)


def _balance(policy: Policy) -> dict[str, float]:
    experts = policy.arch.experts
    return {} if experts is None else policy.routing.balance(experts.count)


@torch.no_grad()
def _apply(policy: Policy) -> tuple[float, bool]:
    """Clip and step, or leave everything as it is where the gradient is not finite. Equal on all ranks."""
    optimizer = policy.optimizer
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return grad_norm, True
    limit = policy.config.optimizer.clip_grad
    if limit > 0.0:
        for chained in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(chained.get_parameters(), max_norm=limit, total_norm=grad_norm)
    with policy.stepping():
        optimizer.step_with_ready_grads()
    return grad_norm, False


def _reduce(policy: Policy, parts: list[Any]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Sum metrics over micro-batches and data-parallel ranks, and hand them to all pipeline stages."""
    device = policy.ranks.device
    sum_names, max_names = (*SUM_NAMES, "entropy", "loss"), MAX_NAMES
    sums = torch.zeros(len(sum_names), 2, dtype=torch.float64, device=device)
    maxima = torch.zeros(len(max_names), dtype=torch.float64, device=device)
    for part_sums, part_maxima in parts:
        assert set(part_sums) == set(sum_names) and set(part_maxima) == set(max_names), (part_sums, part_maxima)
        sums += torch.stack([part_sums[name].detach().double() for name in sum_names])
        maxima = torch.maximum(maxima, torch.stack([part_maxima[name].detach().double() for name in max_names]))
    if policy.ranks.dp_size * policy.ranks.cp_size > 1 and policy.ranks.is_last_stage:
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())  # context-parallel ranks have whole sums
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    if policy.ranks.pp_size > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(sums, source, group=group)
        dist.broadcast(maxima, source, group=group)
    pairs = {name: (float(row[0]), float(row[1])) for name, row in zip(sum_names, sums.tolist(), strict=True)}
    return pairs, dict(zip(max_names, maxima.tolist(), strict=True))
