"""Two operations on packed micro-batches: log-probs without gradient, and one optimizer step.

Both are a :class:`gspo_hpc.policy.passes.Pass` on Megatron's own schedule, so they hold for every pipeline layout.

The scaling identity
--------------------
Wanted is the gradient of ``L = (1/N) sum_i L_i`` over the N samples of a global batch (N tokens when the objective
aggregates by token). Data-parallel rank r has M micro-batches; its micro-batch m returns ::

    l[r, m] = (dp * M / N) * sum of L_i over the samples i in (r, m)

Megatron's schedule multiplies a two-valued loss by ``cp`` and divides it by ``M``; its DDP averages gradients over
``dp * cp`` ranks. The context-parallel ranks of one sample hold parts of one and the same loss, so their gradients add
up to one, and ::

    (1 / (dp * cp)) * sum_r sum_cp sum_m (cp / M) * grad l[r, m]  =  (1/N) sum_i grad L_i

which does not depend on how samples are distributed over ranks and micro-batches. ``tests/gloo`` tests it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from gspo_hpc.algorithms.loss import MAX_NAMES, SUM_NAMES, policy_loss
from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.data.records import Floats
from gspo_hpc.ops.batch import PackedBatch, split_by_sample
from gspo_hpc.ops.batch import build as pack
from gspo_hpc.ops.logprobs import check_targets
from gspo_hpc.policy.passes import Pass, PassMonitor, head, sum_over_context
from gspo_hpc.policy.policy import Policy


@dataclass(frozen=True)
class LogprobResult:
    """The result of a pass without gradient: one tensor a micro-batch, on every rank of the pipeline."""

    logprobs: list[torch.Tensor]  # [R] each, of the response tokens
    entropies: list[torch.Tensor]  # [R] each, in nats
    experts: list[torch.Tensor]  # [T, layers, top_k] int16 each, on the CPU; empty unless they were recorded


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Sums and maxima are over the whole global batch, equal on all ranks."""

    sums: dict[str, tuple[float, float]]  # name -> (sum, count)
    maxima: dict[str, float]
    experts: dict[str, float]  # how tokens were spread over them; empty without
    grad_norm: float
    skipped: bool  # the gradient was not finite; nothing was changed
    overflowed: bool  # skipped in float16 with a loss scale above 1, which is now lowered: expected now and then
    learning_rate: float
    packing: dict[str, float] = field(default_factory=dict)  # how evenly tokens were spread over ranks, micro-batches
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)  # of each expert, by layer
    # Log-probs before the step, by slot and index, of the slots that were to be kept: those that this replica computed.
    logprobs: dict[tuple[int, int], Floats] = field(default_factory=dict)


@torch.no_grad()
def response_logprobs(
    policy: Policy,
    batches: Sequence[PackedBatch],
    temperature: float,
    *,
    name: str,
    record_experts: bool = False,
    monitor: PassMonitor | None = None,
) -> LogprobResult:
    """Return the log-probs of every micro-batch's response tokens under the current weights. Collective.

    `name` is what `monitor` counts the pass as. With `record_experts` the result has the experts that each token went
    to. Raises Abandoned on all ranks if `monitor` requests a stop on one of them.
    """
    this = Pass(policy, name, monitor)

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        whole = next(iterator)
        batch = this.own_part(whole)
        hidden = this.run_stage(batch, model)

        def collect(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if this.abandoned:
                return output.new_zeros(()), output
            values = torch.stack(head(policy, output, batch, temperature))
            if batch.responses is not None:
                values = values.new_zeros(2, whole.targets.numel()).index_copy(1, batch.responses, values)
            return output.new_zeros(()), sum_over_context(policy, values)

        return hidden, collect

    check_targets([batch.targets for batch in batches], policy.arch.vocab_size)
    policy.settle()
    filled = _filled(policy, batches)
    for wrapped in policy.wrapped:
        wrapped.eval()
    try:
        results = this.run(forward_step, filled, forward_only=True, record_experts=record_experts)
    finally:
        for wrapped in policy.wrapped:
            wrapped.train()
    results = _from_last_stage(policy, results, filled, (2,))[: len(batches)]
    experts = this.recorded_experts(batches) if record_experts else []
    return LogprobResult([values[0] for values in results], [values[1] for values in results], experts)


def _from_last_stage(
    policy: Policy, results: list[torch.Tensor], batches: Sequence[PackedBatch], leading: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """Return on every stage what the last one found: values [*leading, R] of each micro-batch. Collective."""
    if policy.ranks.pp_size == 1:
        return results
    if not policy.ranks.is_last_stage:
        results = [
            torch.empty(*leading, b.targets.numel(), dtype=torch.float32, device=b.tokens.device) for b in batches
        ]
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    for result in results:
        if result.numel():
            dist.broadcast(result, source, group=group)
    return results


def _filled(policy: Policy, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return as many batches as the schedule of a virtual pipeline needs: empty ones behind the given ones."""
    missing = -len(batches) % (policy.ranks.pp_size if len(policy.chunks) > 1 else 1)
    return [*batches, *(pack({}, [], share_prompts=False).to(policy.ranks.device) for _ in range(missing))]


def train_step(
    policy: Policy,
    batches: Sequence[PackedBatch],
    objective: Objective,
    denominator: float,
    temperature: float,
    *,
    keep: Collection[int] = (),
    sampled_by_this: bool = False,
    monitor: PassMonitor | None = None,
) -> StepResult:
    """Make one optimizer step on this rank's micro-batches of a global batch. Collective.

    `denominator` is N of the scaling identity: samples (or tokens) of the global batch that count. `keep`: slots whose
    log-probs the result has, as the forward pass found them; they take no other pass. `sampled_by_this`: the present
    weights sampled all of it. Raises Abandoned on all ranks,
    with nothing changed, if `monitor` requests a stop on one of them.
    """
    check_targets([batch.targets for batch in batches], policy.arch.vocab_size)
    policy.restore_for_update()
    for wrapped in policy.wrapped:
        wrapped.zero_grad_buffer()
    policy.optimizer.zero_grad()
    per_microbatch = denominator / (policy.ranks.dp_size * len(batches))
    this = Pass(policy, "update", monitor)
    chosen = [batch for batch in batches if any(slot in keep for slot, _ in batch.keys)]
    kept: dict[int, tuple[PackedBatch, torch.Tensor]] = {}  # by micro-batch: the part of this rank, and its log-probs

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        whole = next(iterator)
        batch = this.own_part(whole)
        hidden = this.run_stage(batch, model)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if this.abandoned:
                return output.sum() * 0.0, None
            bonus = objective.entropy_coef > 0
            logprobs, entropy = head(policy, output, batch, temperature, entropy_gradient=bonus)
            if any(whole is one for one in chosen):
                kept[id(whole)] = batch, logprobs.detach()
            result = policy_loss(
                logprobs,
                batch,
                objective,
                denominator=per_microbatch,
                cp_reduce=lambda x: sum_over_context(policy, x),
                sampled_by_this=sampled_by_this,
                entropy=entropy if bonus else None,
            )
            sums = dict(result.sums)
            masked = torch.where(batch.loss_mask, entropy.detach(), 0.0)
            entropies = torch.stack((masked.sum(), batch.loss_mask.sum().to(masked.dtype)))
            sums["entropy"] = sum_over_context(policy, entropies.detach())
            # An empty micro-batch still runs backward: its ranks take part in the collectives.
            total = result.loss + output.sum() * 0.0
            sums["loss"] = torch.stack((result.loss.detach() * per_microbatch, result.loss.new_zeros(())))
            return total, (sums, result.maxima)

        return hidden, loss

    parts = this.run(forward_step, batches, forward_only=False)
    scale = float(policy.optimizer.get_loss_scale())
    grad_norm, skipped = _apply(policy)
    overflowed = skipped and policy.config.model.dtype == "float16" and scale > 1.0
    rate = float(policy.optimizer.param_groups[0]["lr"])
    policy.scheduler.step(1)  # it counts the steps of the run, also those that change no weight
    sums, maxima = _reduce(policy, parts)
    loss_sum, _ = sums.pop("loss", (0.0, 0.0))
    sums["loss"] = (loss_sum, denominator)
    balance = this.balance()
    logprobs = _kept_logprobs(policy, chosen, kept, keep)
    return StepResult(
        sums,
        maxima,
        balance.metrics,
        grad_norm,
        skipped,
        overflowed,
        rate,
        expert_tokens=balance.tokens,
        logprobs=logprobs,
    )


@torch.no_grad()
def _kept_logprobs(
    policy: Policy,
    chosen: Sequence[PackedBatch],
    kept: Mapping[int, tuple[PackedBatch, torch.Tensor]],
    slots: Collection[int],
) -> dict[tuple[int, int], Floats]:
    """Return the log-probs of the completions of these slots, from the parts that the pass found. Collective."""
    results = []
    for whole in chosen if policy.ranks.is_last_stage else ():
        part, logprobs = kept[id(whole)]
        if part.responses is not None:
            logprobs = logprobs.new_zeros(whole.targets.numel()).index_copy(0, part.responses, logprobs)
        results.append(sum_over_context(policy, logprobs.float()))
    results = _from_last_stage(policy, results, chosen)
    found = [split_by_sample(values, whole) for values, whole in zip(results, chosen, strict=True)]
    return {key: values for one in found for key, values in one.items() if key[0] in slots}


@torch.no_grad()
def _apply(policy: Policy) -> tuple[float, bool]:
    """Clip and step, or change nothing if the gradient is not finite; return the gradient's norm and True if skipped.

    The result is equal on all ranks.
    """
    optimizer = policy.optimizer
    try:
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
    finally:
        optimizer.zero_grad()  # Megatron would keep its fp32 copies of gradients in 16 bits until the next step


def _reduce(policy: Policy, parts: list[Any]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Sum metrics over micro-batches and data-parallel ranks, and send them to all pipeline stages."""
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
