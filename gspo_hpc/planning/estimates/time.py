"""The time of a step, phase by phase, estimated before there is a GPU: data sheets, operations, bytes, few constants.

Generation is a roofline, token by token: what must be read of weights and cache, what must be
computed, what tensor-parallel ranks tell each other, and what a step costs however small it is, while sequences end
one after the other. Passes of the trainer are operations over a share of the peak, with pipeline bubbles and
communication on top. docs/estimates.md holds it against published runs, and says where it misses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

from gspo_hpc.config.derived import offloaded_parts, passes_needed, updates_per_rollout
from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.config.schema import Config
from gspo_hpc.models import flops
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import memory
from gspo_hpc.planning.estimates import parameters as model_memory
from gspo_hpc.planning.estimates.devices import Device

# Calibrated on two of the runs of docs/estimates.md (its "calibration"), the rest are predictions.
EFFICIENCY = 0.62  # of what large products sustain that passes of dense layers reach
EXPERTS_EFFICIENCY = 0.25  # the same for mixtures: small products, tokens sorted to and fro
STEP_SECONDS = 1.5e-3  # of one step of an engine, however little it computes: scheduling, sampling, detokenizing
LAYER_SECONDS = 25e-6  # of one layer of it: its kernels are launched and synchronised
EXPERTS_SECONDS = 100e-6  # more where it has experts: routing, sorting, grouped products of few rows

# Not calibrated: what such hardware is known to give.
BANDWIDTH = 0.75  # of the memory's data sheet, in long reads
LINK = 0.6  # of a link's data sheet, in collectives
NODE_LATENCY, NETWORK_LATENCY = 15e-6, 60e-6  # seconds of one all-reduce of little data
SYNC_LINK = 0.6  # of a link, for weights that travel tensor by tensor
SPREAD = 0.8  # of response lengths: standard deviation of their logarithm, before they are cut
OVERHEAD_SECONDS = 3.0  # of a rollout: graders' last answers, packing, logging
_QUANTILES = 64
_POINTS = [(i + 0.5) / _QUANTILES for i in range(_QUANTILES)]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that the estimate uses."""

    layers: int
    layers_with_experts: int
    hidden: int
    vocabulary: int
    parameters: int
    expert_parameters: int  # of all routed experts, in `parameters`
    experts: int  # of a layer; 0: none
    top_k: int
    token_flops: float  # forward, of all layers, without scores and output layer
    score_flops: float  # forward, of all layers, for one query and one key
    cache_bytes: float  # of one token, in 16 bits, over all layers
    cache_heads: int  # the cache can be cut into as many parts

    @property
    def output_flops(self) -> float:
        """Forward operations of the output layer for one token."""
        return 2.0 * self.hidden * self.vocabulary


@dataclass(frozen=True)
class Work:
    """One rollout: tokens are averages, but for `longest`."""

    completions: int
    completions_per_prompt: int
    prompt_tokens: float
    response_tokens: float
    longest: int  # response


@dataclass(frozen=True)
class Times:
    """Seconds of one rollout with all its updates, by phase, and what follows from them."""

    seconds: dict[str, float]
    updates: int  # optimizer steps of the rollout
    tokens: float  # prompts and responses that are trained on, once
    gpus: int  # all
    trainers: int  # of them, GPUs that train: fewer where some are set apart for engines
    model_flops: float  # of the updates, without what is computed again
    peak: float  # operations a second of one GPU
    steps: int | None = None  # of the whole run

    @property
    def rollout(self) -> float:
        """Seconds from one rollout to the next."""
        return sum(self.seconds.values())

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc plan --json` prints them. `price` is that of one GPU for one hour."""
        hours = None if self.steps is None else self.steps / self.updates * self.rollout / 3600.0
        gpu_hours = None if hours is None else hours * self.gpus
        return {
            "seconds_per_rollout": self.rollout,
            "seconds_per_step": self.rollout / self.updates,
            "phases": self.seconds,
            "tokens_per_s_per_gpu": self.tokens / self.rollout / self.gpus,
            "update_mfu": self.model_flops / (self.seconds["update"] * self.trainers * self.peak),
            "hours": hours,
            "gpu_hours": gpu_hours,
            "cost": None if price is None or gpu_hours is None else price * gpu_hours,
        }


def sizes(arch: Architecture) -> Sizes:
    """Return the sizes used for the estimate."""
    experts = arch.experts
    mixed = sum(map(arch.has_experts, range(arch.num_layers)))
    routed = 0 if experts is None else mixed * experts.count * 3 * arch.hidden_size * experts.ffn_hidden_size
    scores = 4.0 * arch.num_layers * arch.num_attention_heads * arch.head_dim
    cache, heads = 4.0 * arch.num_layers * arch.num_key_value_heads * arch.head_dim, arch.num_key_value_heads
    if arch.mixers:
        scores = 2.0 * sum(mixer.scores for mixer in arch.mixers)
        cache = 2.0 * sum(mixer.cache for mixer in arch.mixers)
        heads = min((mixer.cache_heads for mixer in arch.mixers if mixer.cache), default=1)
    return Sizes(
        layers=arch.num_layers,
        layers_with_experts=mixed,
        hidden=arch.hidden_size,
        vocabulary=arch.vocab_size,
        parameters=model_memory.parameters(arch),
        expert_parameters=routed,
        experts=0 if experts is None else experts.count,
        top_k=0 if experts is None else experts.top_k,
        token_flops=float(flops.per_token(arch)),
        score_flops=scores,
        cache_bytes=cache,
        cache_heads=heads,
    )


def work(config: Config, completions: int, response_tokens: float | None = None) -> Work:
    """Return a rollout of that many completions. Lengths that nobody knows yet are half of what is allowed."""
    rollout = config.rollout
    return Work(
        completions,
        config.batch.num_generations or 1,
        rollout.max_prompt_length / 2,
        min(response_tokens or rollout.max_response_length / 2, rollout.max_response_length),
        rollout.max_response_length,
    )


def estimate(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> Times:
    """Return the times of a rollout. The layout must be one that the plan accepts.

    `cache_tokens` are the tokens that the cache of one engine holds.
    """
    updates = updates_per_rollout(config.batch)
    needed = passes_needed(config)
    forward = _forward_flops(model, config, given)
    trained = given.completions * (given.prompt_tokens + given.response_tokens)
    seconds = {
        "sync": _sync(model, config, device),
        "generation": _prefill(model, config, device, given) + generation(model, config, device, given, cache_tokens),
    }
    if needed.old_logprobs:
        share = 1.0 if config.batch.num_iterations > 1 else 1.0 - 1.0 / updates  # the first update needs none
        seconds["old_logprobs"] = share * _pass(model, config, device, forward, trained, 1, 1.0)
    if needed.reference:
        seconds["reference"] = _pass(model, config, device, forward, trained, 1, 1.0)
        seconds["reference"] += 2 * model.parameters * 2 / _model_ranks(config) / device.host_bytes_per_s
    again = {"full": 1.0, "selective": 0.2}.get(config.memory.recompute_granularity or "", 0.0)
    passes = config.batch.num_iterations
    seconds["update"] = passes * _pass(model, config, device, forward, trained, updates // passes, 3.0 + again)
    seconds["update"] += updates * _optimizer(model, config, device)
    seconds["save"] = updates / config.checkpoint.interval * _save(model, config, device)
    seconds["other"] = OVERHEAD_SECONDS
    return Times(
        seconds,
        updates,
        trained,
        config.cluster.nodes * config.cluster.gpus_per_node,
        config.world_size,
        3.0 * forward * passes,
        device.flops,
        config.run.max_steps,
    )


def lengths(given: Work) -> list[float]:
    """Return response lengths at equally likely points: log-normal, cut at the longest, with the mean that is given."""
    scale = _scale(given)
    return [_cut(given, scale, point) for point in _POINTS]


@cache
def _scale(given: Work) -> float:
    """Return the median of the distribution before it is cut, by bisection."""
    low, high = 0.0, given.longest * 1e3
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(_cut(given, middle, point) for point in _POINTS) / _QUANTILES
        low, high = (middle, high) if mean < given.response_tokens else (low, middle)
    return high


def _cut(given: Work, scale: float, point: float) -> float:
    return min(float(given.longest), scale * math.exp(SPREAD * NormalDist().inv_cdf(point)))


def generation(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> float:
    """Return the seconds until the last completion of a rollout has ended, prompts left out."""
    each = given.completions / _engines(config)
    held = max(1.0, cache_tokens / (given.prompt_tokens / given.completions_per_prompt + given.response_tokens))
    at_once = min(each, held, engine_setting(config, "max_num_seqs"))
    ends = lengths(given)
    # While others wait, every sequence that ends makes room for one more.
    mean = sum(ends) / len(ends)
    seconds = (each - at_once) * mean / at_once * step_seconds(model, config, device, at_once, mean / 2, given)
    begin = 0.0
    for number, end in enumerate(ends):
        alive = at_once * (len(ends) - number) / len(ends)
        seconds += (end - begin) * step_seconds(model, config, device, max(1.0, alive), (begin + end) / 2, given)
        begin = end
    last = longest_of(given) - begin  # of all engines, the one that has the longest
    return seconds + last * step_seconds(model, config, device, 1.0, begin, given)


def _engines(config: Config) -> int:
    """Return the engines of all nodes."""
    if config.rollout.mode == "server" or config.rollout.engines_per_node:
        return config.cluster.nodes * (config.rollout.engines_per_node or 1)
    return max(1, config.world_size // config.rollout.tensor_parallel_size)


def longest_of(given: Work) -> float:
    """Return the length that all wait for: one completion in as many as there are would be longer."""
    return _cut(given, _scale(given), 1.0 - 0.5 / given.completions)


def step_seconds(model: Sizes, config: Config, device: Device, alive: float, generated: float, given: Work) -> float:
    """Return the seconds of one token of `alive` sequences of an engine, each with `generated` tokens so far."""
    tp = config.rollout.tensor_parallel_size
    seen = alive * (given.prompt_tokens + generated)
    used = 1.0 - (1.0 - model.top_k / model.experts) ** alive if model.experts else 0.0  # experts that have a token
    weights = 2.0 * (model.parameters - model.expert_parameters * (1.0 - used)) / tp
    cache = seen * model.cache_bytes / min(tp, model.cache_heads)
    reading = (weights + cache) / (device.memory_bytes_per_s * BANDWIDTH)
    computing = alive * (model.token_flops + model.output_flops) + seen * model.score_flops
    computing /= tp * device.sustained_flops * EFFICIENCY
    seconds = max(reading, computing) + STEP_SECONDS
    seconds += model.layers * LAYER_SECONDS + model.layers_with_experts * EXPERTS_SECONDS
    if tp > 1:
        wide = tp > config.cluster.gpus_per_node
        latency, link = (
            (NETWORK_LATENCY, device.network_bytes_per_s) if wide else (NODE_LATENCY, device.node_bytes_per_s)
        )
        moved = 2.0 * (tp - 1) / tp * alive * model.hidden * 2.0
        seconds += 2 * model.layers * (latency + moved / (link * LINK))
    return seconds


def _efficiency(model: Sizes) -> float:
    return EXPERTS_EFFICIENCY if model.layers_with_experts else EFFICIENCY


def _forward_flops(model: Sizes, config: Config, given: Work) -> float:
    """Return the operations of all completions of a rollout; a shared prompt is computed once a group."""
    length = given.prompt_tokens + given.response_tokens
    prompts = given.completions / (given.completions_per_prompt if config.batch.share_prompts else 1)
    tokens = given.completions * given.response_tokens + prompts * given.prompt_tokens
    seen = given.completions * length * length / 2 * (1.0 + SPREAD**2 / 4)
    outputs = given.completions * given.response_tokens * model.output_flops
    return tokens * model.token_flops + seen * model.score_flops + outputs


def _prefill(model: Sizes, config: Config, device: Device, given: Work) -> float:
    operations = given.completions / given.completions_per_prompt * given.prompt_tokens * model.token_flops
    gpus = _engines(config) * config.rollout.tensor_parallel_size
    return operations / (gpus * device.sustained_flops * _efficiency(model))


def _pass(
    model: Sizes, config: Config, device: Device, forward: float, tokens: float, updates: int, work_factor: float
) -> float:
    """Return the seconds of a pass over all tokens: `work_factor` forward passes, in `updates` parts."""
    parallel = config.parallel
    tp, pp, cp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    replicas = max(1, config.world_size // (tp * pp * cp))
    micro = memory.micro_batch_tokens(config)
    batches = max(1.0, tokens / updates / replicas / micro)
    computing = work_factor * forward / (config.world_size * device.sustained_flops * _efficiency(model))
    own = tokens / replicas / cp  # of one rank
    node = config.training_gpus_per_node
    bytes_ = {
        "node": 4.0 * (tp - 1) / tp * model.hidden * 2.0 * own * model.layers / pp,
        "network": 0.0,
    }
    if tp > model.cache_heads:  # queries, keys and values of all heads are gathered
        bytes_["node"] += 2.0 * (tp - 1) / tp * (model.score_flops / 4 + model.cache_bytes / 2) * own / pp
    if cp > 1:
        gathered = model.cache_bytes / min(tp, model.cache_heads) / pp * (cp - 1) * own
        bytes_["network" if tp * cp > node else "node"] += gathered
    if ep > 1:
        shared = tp if parallel.sequence_parallel else 1
        moved = 2.0 * model.top_k * model.hidden * 2.0 * (ep - 1) / ep * own / shared * model.layers_with_experts / pp
        bytes_["network" if ep * (parallel.expert_tensor_parallel_size or tp) > node else "node"] += moved
    talking = bytes_["node"] / (device.node_bytes_per_s * LINK) + bytes_["network"] / (
        device.network_bytes_per_s * LINK
    )
    bubble = (pp - 1) / (chunks * batches)
    return (computing + work_factor * talking) * (1.0 + bubble) * divisions.largest_share(model.layers, parallel)


def _model_ranks(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size


def _optimizer(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds in which gradients are summed over replicas, Adam steps, and weights are gathered."""
    dense = (model.parameters - model.expert_parameters) / _model_ranks(config)
    parallel = config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    owners = etp * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    own = dense + model.expert_parameters / owners
    replicas = max(1, config.world_size // _model_ranks(config))
    wide = config.optimizer.grad_reduce_in_fp32
    moved = (dense + model.expert_parameters / owners * (config.world_size > owners)) * (4.0 if wide else 2.0) * 2.0
    link = device.network_bytes_per_s if config.cluster.nodes > 1 else device.node_bytes_per_s
    reducing = moved / (link * LINK) * (replicas > 1) * (0.3 if parallel.overlap_grad_reduce else 1.0)
    state = own * 20.0 / (replicas if config.optimizer.distributed else 1)
    rate = device.host_bytes_per_s if config.memory.offload_optimizer else device.memory_bytes_per_s * BANDWIDTH
    return reducing + state / rate


def _sync(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds in which all weights reach every engine, and offloaded state goes to the host and back."""
    over_nodes = _model_ranks(config) > config.training_gpus_per_node
    link = device.network_bytes_per_s if over_nodes else device.node_bytes_per_s
    seconds = 2.0 * model.parameters / (link * SYNC_LINK)
    if moved := offloaded_parts(config):
        replicas = max(1, config.world_size // _model_ranks(config))
        optimizer = 12.0 / (replicas if config.optimizer.distributed else 1)
        each = 2.0 * ("weights" in moved) + optimizer * ("optimizer" in moved)
        seconds += 2.0 * model.parameters / _model_ranks(config) * each / device.host_bytes_per_s
    return seconds


def _save(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds that a save holds training up: those of a copy to the host if it is written in background."""
    state = 14.0 * model.parameters / config.world_size
    return state / device.host_bytes_per_s * (1.0 if config.checkpoint.async_save else 10.0)
