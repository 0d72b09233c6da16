"""Ways to save the memory of a GPU, from the cheapest to the dearest, and how much of a card must be left.

Each is tried where a layout leaves too little without it. What a config keeps is never changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from gspo_hpc.config.derived import offload_trainer
from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.config.schema import Batch, Config, replace
from gspo_hpc.config.section import written
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import advice, memory, phases
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.estimates.phases import HEADROOM
from gspo_hpc.planning.plan import judge
from gspo_hpc.planning.settings import ENGINE, value_of, with_value

UTILIZATION = f"{ENGINE}gpu_memory_utilization"
KEYS = (  # that are chosen only where a layout needs it
    "memory.recompute_granularity",
    "memory.offload_optimizer",
    "memory.offload_trainer",
    "batch.micro_batch_tokens",
    "rollout.sleep_level",
    "optimizer.grad_reduce_in_fp32",
    UTILIZATION,
)
_MORE = 0.01  # of the card, that is worth a change


def fitting(
    arch: Architecture, device: Device, wanted: Config, keep: frozenset[str]
) -> Iterator[tuple[Config, Estimate]]:
    """Yield the layout with every way of saving memory with which it fits, until one leaves enough.

    Gradients in 16 bits change sums, so they are tried only where nothing else is enough.
    """
    found_one, config = False, wanted
    if not _may_fit(arch, device, wanted, keep):
        return
    for config in _ways(wanted, keep):
        if (one := _tried(arch, device, config, keep)) is not None:
            found_one = True
            yield one
            if one[1].headroom >= HEADROOM:
                return
    narrow = config.optimizer.grad_reduce_in_fp32 and config.model.dtype != "float32"
    if not found_one and narrow and "optimizer.grad_reduce_in_fp32" not in keep:
        last = replace(config, optimizer=replace(config.optimizer, grad_reduce_in_fp32=False))
        if (one := _tried(arch, device, last, keep)) is not None:
            yield one


def roomier(
    arch: Architecture,
    device: Device,
    config: Config,
    found: Estimate,
    models: Models,
    keep: frozenset[str] = frozenset(),
) -> tuple[str, float] | None:
    """Return settings that leave more of a GPU, with what they leave; None if none of those that are tried helps.

    The first that is enough alone, or else the fewest of them together. Settings help that leave more by `_MORE`, and
    do not exceed the GPU: they are for a run that has run out of memory.
    """
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    response = config.rollout.max_response_length // 2
    ways: list[dict[str, Any]] = [
        {"memory.recompute_granularity": "full"},
        {"memory.offload_optimizer": True},
        {"optimizer.grad_reduce_in_fp32": False},
    ]
    if (config.batch.micro_batch_tokens or 0) > longest:
        ways.insert(0, {"batch.micro_batch_tokens": longest})
    shorter: dict[str, Any] = {"rollout.max_response_length": response}
    if config.batch.micro_batch_tokens:
        shorter = {"batch.micro_batch_tokens": longest - config.rollout.max_response_length + response} | shorter
    ways = [way for way in (*ways, shorter) if not keep.intersection(way)]
    ways = [way for way in ways if any(value_of(config, key) != value for key, value in way.items())]
    for count in range(1, len(ways) + 1):
        for some in itertools.combinations(ways, count):
            changes = {key: value for way in some for key, value in way.items()}
            changed = config
            for key, value in changes.items():
                changed = with_value(changed, key, value)
            headroom = memory.estimate(arch, changed, device).headroom
            enough = headroom >= 0 and headroom > found.headroom + _MORE
            if enough and not judge(changed, models=models, enough=0).broken:
                return " ".join(f"{key}={written(value)}" for key, value in changes.items()), headroom
    return None


def lightest(arch: Architecture, device: Device, wanted: Config, keep: frozenset[str]) -> Estimate:
    """Return the memory of the layout with all that saves it, gradients in 16 bits among it where they do."""
    ways = [(way, memory.estimate(arch, way, device)) for way in _lightest(wanted, keep)]
    found = [_with_engine_share(arch, device, way, keep, one)[1] for way, one in ways]
    return min(found, key=lambda one: one.peak.total)


def holds_state(arch: Architecture, device: Device, wanted: Config, keep: frozenset[str]) -> bool:
    """Return whether a GPU holds what stays of the trainer between steps: without that nothing else needs a look.

    Also of a layout that no rule allows; True where its layers cannot be divided.
    """
    if divisions.layers_per_stage(arch.num_layers, wanted.parallel) is None:
        return True
    return any(memory.holds_state(arch, way, device) for way in _by_gradients(wanted, keep))


def engine_holds_sequence(arch: Architecture, device: Device, wanted: Config, keep: frozenset[str]) -> bool:
    """Return whether an engine holds the longest sequence if it may take as much of a card as any layout gives it."""
    if UTILIZATION not in keep:
        wanted = with_value(wanted, UTILIZATION, max(advice.MOST, engine_setting(wanted, "gpu_memory_utilization")))
    longest = wanted.rollout.max_prompt_length + wanted.rollout.max_response_length
    return memory.cache_tokens(arch, wanted, device) >= longest


def _may_fit(arch: Architecture, device: Device, wanted: Config, keep: frozenset[str]) -> bool:
    """Return whether the layout fits on a GPU with all that saves memory: most that do not fit are known by that."""
    ways = (_with_least_share(arch, device, way, keep) for way in _lightest(wanted, keep))
    return any(memory.fitting(arch, way, device) is not None for way in ways)


def _lightest(wanted: Config, keep: frozenset[str]) -> list[Config]:
    """Return the layout with all that saves memory.

    With gradients in 32 and in 16 bits: either may take less, for those in 16 bits have copies in fp32 while the
    optimizer steps.
    """
    last = _way(wanted, *[values[-1] for values in _choices(wanted, keep)])
    return list(_by_gradients(last, keep))


def _by_gradients(config: Config, keep: frozenset[str]) -> Iterator[Config]:
    """Yield the layout with gradients in 32 and in 16 bits, where it may have both."""
    if "optimizer.grad_reduce_in_fp32" in keep or config.model.dtype == "float32":
        yield config
        return
    for wide in (True, False):
        own = wide == config.optimizer.grad_reduce_in_fp32
        yield config if own else replace(config, optimizer=replace(config.optimizer, grad_reduce_in_fp32=wide))


def _tried(arch: Architecture, device: Device, config: Config, keep: frozenset[str]) -> tuple[Config, Estimate] | None:
    """Return the layout with what its engine and its nodes need, if it fits."""
    least = _with_least_share(arch, device, config, keep)
    if (whole := memory.fitting(arch, least, device)) is None:
        return None
    whole = whole if least is config else memory.estimate(arch, config, device)
    config, found = _with_engine_share(arch, device, config, keep, whole)
    if memory.lacks_host_memory(found, config) and "rollout.sleep_level" not in keep:
        config = replace(config, rollout=replace(config.rollout, sleep_level=2))
        found = memory.estimate(arch, config, device)
    return (config, found) if memory.fits(found, config) else None


def _ways(config: Config, keep: frozenset[str]) -> Iterator[Config]:
    """Yield the layout with ever more recomputed and offloaded."""
    for choice in itertools.product(*_choices(config, keep)):
        yield _way(config, *choice)


def _choices(config: Config, keep: frozenset[str]) -> tuple[list[Any], ...]:
    """Return what `_way` may be given, the last of each what saves most."""
    again = [config.memory.recompute_granularity] if "memory.recompute_granularity" in keep else [None, "full"]
    optimizer = [config.memory.offload_optimizer] if "memory.offload_optimizer" in keep else [False, True]
    trainer = [config.memory.offload_trainer]
    if "memory.offload_trainer" not in keep and config.rollout.mode == "colocate" and not offload_trainer(config):
        trainer.append(True)
    budgets = [config.batch.micro_batch_tokens]
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if "batch.micro_batch_tokens" not in keep and budgets[0] and budgets[0] > longest:
        budgets.append(longest)
    return trainer, optimizer, budgets, again


def _way(config: Config, aside: bool | None, offload: bool, tokens: int | None, granularity: str | None) -> Config:
    """Return the layout with the trainer aside, its optimizer offloaded, a token budget, and layers recomputed."""
    settings = replace(
        config.memory, recompute_granularity=granularity, offload_optimizer=offload, offload_trainer=aside
    )
    return replace(config, memory=settings, batch=_with_budget(config, tokens))


def _with_budget(config: Config, tokens: int | None) -> Batch:
    """Return the batch sizes with at most this token budget for every pass."""
    batch = config.batch
    if tokens == batch.micro_batch_tokens or tokens is None:
        return batch
    names = ("logprob_micro_batch_tokens", "reference_micro_batch_tokens")
    smaller = {name: min(given, tokens) for name in names if (given := getattr(batch, name))}
    return replace(batch, micro_batch_tokens=tokens, **smaller)


def _with_least_share(arch: Architecture, device: Device, config: Config, keep: frozenset[str]) -> Config:
    """Return the layout with the least share of the card for an engine that holds a sequence beside the trainer.

    As it is where the trainer leaves the card to the engine: then the share is in none of the trainer's phases.
    """
    if UTILIZATION in keep or config.rollout.mode != "colocate" or offload_trainer(config):
        return config
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    least = math.ceil(100 * memory.engine_bytes(arch, config, device, longest) / device.memory) / 100
    own = engine_setting(config, "gpu_memory_utilization")
    return config if least >= own else with_value(config, UTILIZATION, least)


def _with_engine_share(
    arch: Architecture, device: Device, config: Config, keep: frozenset[str], found: Estimate
) -> tuple[Config, Estimate]:
    """Return the layout with a share of the card for its engine that leaves room beside it and holds a sequence.

    `found` is its estimate with the share that it has.
    """
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    parts = found.phase("generation").parts
    engine = sum(size for name, size in parts.items() if name in phases.OF_ENGINES)
    if UTILIZATION in keep or (engine + found.beside_engine <= found.card and found.cache_tokens >= longest):
        return config, found
    most = min(advice.MOST, math.floor(100 * (1 - found.beside_engine / device.memory)) / 100)
    if most <= 0:
        return config, found
    changed = with_value(config, UTILIZATION, most)
    return changed, memory.estimate(arch, changed, device)
