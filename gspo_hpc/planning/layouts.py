"""The best layouts for a model on given GPUs, ranked by the estimated time of a step, each with its reasons.

Every layout that is looked at is judged by the rules of the plan and by the memory estimate;
what fits with room to spare is ranked by the time estimate. Recomputation and offloading are taken only where a layout
does not fit without them. Among layouts that are about as fast, tensor parallelism within a node goes before pipelines,
and these before experts on ranks of their own; fewer cuts go before more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gspo_hpc.config.schema import Config, replace
from gspo_hpc.config.section import written
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import devices, time
from gspo_hpc.planning.estimates import memory as memory_estimate
from gspo_hpc.planning.estimates.memory import shown
from gspo_hpc.planning.fixes.candidates import divisors
from gspo_hpc.planning.plan import Plan, judge, make_plan
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.rules.registry import topic
from gspo_hpc.system.text import in_gib

ALIKE = 1.03  # times that differ by less than estimates can tell: preference decides
_TENSOR, _PIPELINE, _EXPERT, _CONTEXT = 0.3, 0.5, 0.4, 0.45  # what a doubling of each counts against a layout, of ALIKE

KEYS = (  # that are chosen, where they are not kept
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
    "parallel.sequence_parallel",
    "rollout.tensor_parallel_size",
    "optimizer.distributed",
    "memory.recompute_granularity",
    "memory.offload_optimizer",
)


# Settings that belong to the config's own layout: they are printed if a suggestion resets them.
_GIVEN_UP = (
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.num_layers_in_first_pipeline_stage",
    "parallel.num_layers_in_last_pipeline_stage",
    "memory.recompute_num_layers",
)


@dataclass(frozen=True)
class Layout:
    """One suggestion."""

    settings: dict[str, Any]  # dotted key -> value: every one of KEYS, and what a layout cannot keep of the config
    seconds: float  # of an optimizer step, its share of the rollout included
    tokens_per_s_per_gpu: float
    headroom: float  # share of the card that passes leave
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{key}={written(value)}" for key, value in self.settings.items())

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc suggest --json` prints them."""
        return {**vars(self), "reasons": list(self.reasons)}


def find(
    config: Config, keep: frozenset[str] = frozenset(), limit: int = 5, response_tokens: float | None = None
) -> list[Layout]:
    """The best layouts first, at most `limit`; none where nothing fits.

    `keep`: dotted keys of KEYS that stay as the config has them. ValueError names one that cannot be chosen anyway, and
    what is missing: cluster.gpu, or a model whose sizes are known.
    """
    if unknown := sorted(keep - set(KEYS)):
        raise ValueError(
            f"{unknown[0]} is not chosen by suggest, so it stays as it is; suggest chooses: {', '.join(KEYS)}"
        )
    if config.cluster.gpu is None:
        raise ValueError(f"cluster.gpu says which GPUs there are: give one of {', '.join(devices.DEVICES)}")
    device = devices.find(config.cluster.gpu, config.cluster.network_gb_per_s)
    arch = architecture.find(config)
    if arch is None:
        raise ValueError(
            f"model.path {config.model.path}: the sizes of the model are not known, so no layout can be suggested"
        )
    model, found = time.sizes(arch), []
    for wanted in _layouts(arch, config, keep):
        fitting = _fit(wanted, keep)
        if fitting is None:
            continue
        chosen, plan = fitting
        assert plan.memory is not None
        completions = int(plan.quantities.get("generation_batch_size", config.batch.global_batch_size or 1))
        work = time.work(chosen, completions, response_tokens)
        times = time.estimate(model, chosen, device, work, plan.memory.cache_tokens)
        found.append((times, chosen, plan))
    best = sorted(found, key=lambda one: one[0].rollout * ALIKE ** _cost(one[1]))[:limit]
    return [_layout(config, times, chosen, plan) for times, chosen, plan in best]


def _layout(config: Config, times: time.Times, chosen: Config, plan: Plan) -> Layout:
    assert plan.memory is not None
    settings = {key: _value(chosen, key) for key in KEYS}
    settings |= {key: _value(chosen, key) for key in _GIVEN_UP if _value(config, key) != _value(chosen, key)}
    told = times.to_json()
    return Layout(
        settings,
        told["seconds_per_step"],
        told["tokens_per_s_per_gpu"],
        plan.memory.headroom,
        tuple(_reasons(times, chosen, plan)),
    )


def _reasons(times: time.Times, chosen: Config, plan: Plan) -> Iterator[str]:
    memory, phases = plan.memory, sorted(times.seconds.items(), key=lambda item: -item[1])
    assert memory is not None
    yield (", ".join(f"{shown(name)} {seconds / times.rollout:.0%}" for name, seconds in phases[:3]) + " of the time")
    yield f"{shown(memory.busiest.name)} takes {in_gib(memory.busiest.total, 0)} GiB of a GPU"
    if chosen.memory.recompute_granularity == "full":
        yield "layers are recomputed, because activations do not fit otherwise"
    if chosen.memory.offload_optimizer:
        yield "the optimizer's state waits in host memory, because it does not fit otherwise"
    replicas = plan.layout.get("data_parallel_size", 1)
    if chosen.parallel.pipeline_model_parallel_size > 1 and (gbs := chosen.batch.global_batch_size):
        yield f"{gbs // replicas} completions of an update go through each of {replicas} pipelines"


def _fit(wanted: Config, keep: frozenset[str]) -> tuple[Config, Plan] | None:
    """Return the layout with the least recomputation and offloading that leave headroom; None if nothing does."""
    again = (False,) if "memory.recompute_granularity" in keep else (False, True)
    aside = (False,) if "memory.offload_optimizer" in keep else (False, True)
    for offload, full in itertools.product(aside, again):
        memory = wanted.memory
        if "memory.recompute_granularity" not in keep:
            memory = replace(memory, recompute_granularity="full" if full else None)
        if "memory.offload_optimizer" not in keep:
            memory = replace(memory, offload_optimizer=offload)
        chosen = replace(wanted, memory=memory)
        plan = make_plan(chosen)
        if any(topic(item.rule) is not Topic.MEMORY for item in plan.broken):
            return None  # saving memory does not help
        if plan.valid and plan.memory is not None and plan.memory.headroom >= memory_estimate.HEADROOM:
            return chosen, plan
    return None


_PIECE = 8192  # tokens of a sequence that are worth a context-parallel rank of their own


def _layouts(arch: Architecture, config: Config, keep: frozenset[str]) -> Iterator[Config]:
    """Yield every sensible way to cut the model: tensor-parallel ranks stay on their node."""

    def choices(key: str, values: list[Any]) -> list[Any]:
        return [_value(config, key)] if key in keep else values

    for engine in choices("rollout.tensor_parallel_size", _engines(arch, config)):
        given = replace(config, rollout=replace(config.rollout, tensor_parallel_size=engine))
        world = judge(given).world  # GPUs that train: what engines leave, where they are set apart
        if world is not None:
            yield from _cuts(arch, given, keep, world, choices)


def _cuts(
    arch: Architecture,
    config: Config,
    keep: frozenset[str],
    world: int,
    choices: Callable[[str, list[Any]], list[Any]],
) -> Iterator[Config]:
    """Yield every way to cut the model over `world` ranks."""
    gpus, own, mixed = config.cluster.gpus_per_node, config.parallel, arch.experts is not None
    most = min(gpus, world)
    tensor = [n for n in range(1, most + 1) if divisions.trainer_divides_heads(arch, n)]
    pipeline = [n for n in _divisors(world) if n <= 32 and divisions.even_ends(arch.num_layers, n) is not None]
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    context = [n for n in _divisors(world) if n == 1 or longest / n >= _PIECE]
    expert = [n for n in _divisors(world) if arch.experts is not None and arch.experts.count % n == 0] or [1]
    for tp, pp, cp, ep in itertools.product(
        choices("parallel.tensor_model_parallel_size", [n for n in tensor if world % n == 0]),
        choices("parallel.pipeline_model_parallel_size", pipeline),
        choices("parallel.context_parallel_size", context),
        choices("parallel.expert_model_parallel_size", expert),
    ):
        if world % (tp * pp * cp):
            continue
        first, last = divisions.ends(arch.num_layers, pp, own)
        for etp in choices("parallel.expert_tensor_parallel_size", sorted({1, tp}) if mixed else [None]):
            if world % ((etp or tp) * ep * pp):
                continue
            parallel = replace(
                own,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=None,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=None if etp == tp else etp,
                sequence_parallel=own.sequence_parallel if "parallel.sequence_parallel" in keep else tp > 1,
            )
            distributed = config.optimizer.distributed if "optimizer.distributed" in keep else world > tp * pp
            yield replace(
                config,
                parallel=parallel,
                memory=replace(
                    config.memory, recompute_num_layers=divisions.groups(arch.num_layers, parallel, config.memory)
                ),
                optimizer=replace(config.optimizer, distributed=distributed),
            )


def _engines(arch: Architecture, config: Config) -> list[int]:
    """Return the two smallest engines that have room for their weights and some cache."""
    assert config.cluster.gpu is not None
    card, item = devices.find(config.cluster.gpu).memory, 4 if config.model.dtype == "float32" else 2
    weights = time.sizes(arch).parameters * item
    sizes = [n for n in _divisors(config.cluster.gpus_per_node) if divisions.engine_divides_heads(arch, n)]
    return [n for n in sizes if weights / n < 0.6 * card][:2] or sizes[-1:]


def _cost(config: Config) -> float:
    """Return the preference against a layout besides its time, in steps of ALIKE."""
    parallel = config.parallel
    return (
        _TENSOR * _doublings(parallel.tensor_model_parallel_size)
        + _PIPELINE * _doublings(parallel.pipeline_model_parallel_size)
        + _CONTEXT * _doublings(parallel.context_parallel_size)
        + _EXPERT * _doublings(parallel.expert_model_parallel_size)
        + 0.5 * config.memory.offload_optimizer
    )


def _doublings(size: int) -> int:
    return size.bit_length() - 1


def _divisors(number: int) -> list[int]:
    return [n for n in divisors(number) if n & (n - 1) == 0 or number <= 64]


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
