"""Changes with which the trainer takes less of a GPU: only those that are enough by the estimate itself.

Each is tried alone, then several together. Where the GPUs that train may hold the model at all, `suggest` is named: it
looks whether a layout does, which takes longer. Otherwise only more of them, or larger ones, can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from gspo_hpc.config.derived import offload_trainer, pass_sizes
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import memory, parameters
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.settings import value_of, with_value

LARGER = "GPUs with more memory"
_SHOWN = 3  # ways of as many changes
_PASSES = {"update": "", "old_logprobs": "logprob_", "reference": "reference_"}  # with what their batch sizes begin

Settings = tuple[tuple[str, Any], ...]


def ways(arch: Architecture, config: Config, device: Device, headrooms: Sequence[float]) -> str:
    """Return what brings every phase of the trainer onto a GPU and leaves as much of it for passes: a message's end.

    Of settings, each is enough alone; where none is, as few as are enough together. Of `headrooms`, shares of the card,
    the first counts with which there are any.
    """
    found = memory.estimate(arch, config, device)
    lacks, changes = memory.lacks_host_memory(found, config), tuple(_changes(arch, config, found))

    @cache
    def left(chosen: tuple[Settings, ...]) -> float:
        """Return the headroom with these changes, or less than any where they do not fit."""
        changed = _with(config, itertools.chain(*chosen))
        new = memory.estimate(arch, changed, device)
        fits = new.peak.total <= device.memory and (lacks or not memory.lacks_host_memory(new, changed))
        return new.headroom if fits else -math.inf

    def leaving(least: float) -> list[tuple[Settings, ...]]:
        return _fewest(changes, lambda chosen: left(chosen) >= least)

    options = next(filter(None, map(leaving, headrooms)), [])
    texts = [text(itertools.chain(*chosen)) for chosen in options]
    return " or ".join([*texts, _machines(arch, config, device)])


def engine_sizes(config: Config, arch: Architecture) -> Iterator[tuple[Config, Settings]]:
    """Yield the config, then it with every larger engine that the rules allow; as many GPUs generate as before."""
    rollout, gpus = config.rollout, config.gpus_per_engine_node
    size, engines = rollout.tensor_parallel_size, rollout.engines_per_node
    yield config, ()
    for larger in range(size + 1, gpus + 1):
        if gpus % larger or not divisions.engine_divides_heads(arch, larger):
            continue
        settings: Settings = (("rollout.tensor_parallel_size", larger),)
        if engines is not None:
            if engines * size % larger:
                continue
            settings += (("rollout.engines_per_node", engines * size // larger),)
        yield _with(config, settings), settings


def text(settings: Iterable[tuple[str, Any]]) -> str:
    """Return settings as they stand on a command line."""
    return " ".join(f"{key}={written(value)}" for key, value in settings)


def _with(config: Config, settings: Iterable[tuple[str, Any]]) -> Config:
    for key, value in settings:
        config = with_value(config, key, value)
    return config


def _fewest(
    changes: tuple[Settings, ...], enough: Callable[[tuple[Settings, ...]], bool]
) -> list[tuple[Settings, ...]]:
    """Return the smallest sets of changes that are enough; none where not even all of them are."""
    if not changes or not enough(changes):
        return []
    for count in range(1, len(changes)):
        if found := [chosen for chosen in itertools.combinations(changes, count) if enough(chosen)]:
            return found if count == 1 else found[:_SHOWN]
    return [changes]


def _changes(arch: Architecture, config: Config, found: Estimate) -> Iterator[Settings]:
    """Yield changes that save memory, the cheapest first: none that is made already."""
    parallel, kept = config.parallel, config.memory
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if not config.optimizer.distributed and (config.world_size or 1) > model_ranks:
        yield (("optimizer.distributed", True),)
    if kept.recompute_granularity != "full":
        yield (("memory.recompute_granularity", "full"),)
    yield from _smaller(config)
    if not kept.offload_optimizer:
        yield (("memory.offload_optimizer", True),)
    sync = found.phase("sync")
    if sync.total > found.card and (weights := sync.parts.get("engine_weights")):  # engines are awake in it
        if not offload_trainer(config):
            yield (("memory.offload_trainer", True),)
        for changed, settings in engine_sizes(config, arch):
            cut = weights * config.rollout.tensor_parallel_size // changed.rollout.tensor_parallel_size
            if settings and sync.total - weights + cut <= found.card:
                yield settings
                return


def _smaller(config: Config) -> Iterator[Settings]:
    """Yield the smallest micro-batch of each pass that has a larger one, and where it has a size of its own."""
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    sizes = pass_sizes(config)
    for name, prefix in _PASSES.items():
        if not sizes[name].needed:
            continue
        for part, least in (("tokens", longest), ("size", 1)):
            size, key = getattr(sizes[name], f"micro_batch_{part}"), f"batch.{prefix}micro_batch_{part}"
            own = not prefix or value_of(config, key) is not None
            if own and size is not None and size > least:
                yield ((key, least),)


def _machines(arch: Architecture, config: Config, device: Device) -> str:
    """Return what has room: what `suggest` finds if the model may be cut so that a part fits, else other GPUs."""
    parallel, world = config.parallel, config.world_size or 1
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    least = parameters.least_state(arch, config) / world + memory.CONTEXT
    if world > ranks and least <= device.memory:
        return "other settings or machines (gspo-hpc suggest)"
    return f"more GPUs that train, or {LARGER}"
