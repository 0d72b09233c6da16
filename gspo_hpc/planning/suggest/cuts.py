"""Every sensible way to cut a model over the GPUs of a config: parallel sizes of the trainer and of engines.

Which sizes are allowed is not decided here: the rules of the plan do that, cut by cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from gspo_hpc.config.derived import engine_over_nodes
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.plan import judge
from gspo_hpc.planning.settings import divisors, value_of

KEYS = (  # that are chosen for every layout, where they are not kept
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
    "parallel.sequence_parallel",
    "rollout.tensor_parallel_size",
    "optimizer.distributed",
    "parallel.overlap_grad_reduce",
)
_ENGINE = "rollout.tensor_parallel_size"
_PIECE = 8192  # tokens of a sequence that are worth a context-parallel rank of their own
_ROOMY, _FULL = 0.6, 0.85  # of a card: weights of an engine that leave room for a cache, and that leave some

Choices = Callable[[str, list[Any]], list[Any]]


def every(
    arch: Architecture,
    config: Config,
    keep: frozenset[str],
    models: Models,
    is_looked_at: Callable[[Config], bool] = lambda _: True,
) -> Iterator[Config]:
    """Yield every sensible way to cut the model: tensor-parallel ranks stay on their node.

    With `is_looked_at`, only those with engines for which it is true: it gets the config with each size of them.
    """

    def choices(key: str, values: list[Any]) -> list[Any]:
        return [value_of(config, key)] if key in keep else values

    for engine in choices(_ENGINE, _engines(arch, config, models)):
        given = _with_engine(config, engine)
        if not is_looked_at(given):
            continue
        world = judge(given, models=models).world  # GPUs that train: what engines leave, where they are set apart
        if world is not None:
            yield from _cuts(arch, given, keep, world, choices)


def _with_engine(config: Config, size: int) -> Config:
    return replace(config, rollout=replace(config.rollout, tensor_parallel_size=size))


def _engines(arch: Architecture, config: Config, models: Models) -> list[int]:
    """Return the two smallest engines that the rules allow and that have room for their weights and some cache.

    This version runs no engine over nodes: there is one only for who asks for it, of the size that the config gives.
    """
    own = devices.card(config.cluster)
    assert own is not None
    card, item = own.memory, 4 if config.model.dtype == "float32" else 2
    weights, given = parameters.parameters(arch) * item, config.rollout.tensor_parallel_size
    sizes = [*_divisors(config.gpus_per_engine_node), *([given] if engine_over_nodes(config) else [])]

    def roomy(share: float) -> Iterator[int]:
        """Yield the engines whose weights take at most this share of a card."""
        for size in sizes:
            if weights / size < share * card and _allowed(_with_engine(config, size), models):
                yield size

    if found := list(itertools.islice(roomy(_ROOMY), 2)):
        return found
    return list(itertools.islice(roomy(_FULL), 1)) or list(roomy(math.inf))[-1:]  # too small: memory will say so


def _allowed(config: Config, models: Models) -> bool:
    """Return whether no rule speaks against the size of the engine."""
    broken = judge(config, models=models).broken
    if not broken:
        return True
    from gspo_hpc.planning.mentions import mentioned

    return not any(_ENGINE in mentioned(item.message) for item in broken)


def _cuts(arch: Architecture, config: Config, keep: frozenset[str], world: int, choices: Choices) -> Iterator[Config]:
    """Yield every way to cut the model over `world` ranks."""
    gpus, own, mixed = config.cluster.gpus_per_node, config.parallel, arch.experts is not None
    most = min(gpus, world)
    tensor = [n for n in range(1, most + 1) if world % n == 0 and divisions.trainer_divides_heads(arch, n)]
    pipeline = [n for n in _divisors(world) if n <= 32 and divisions.even_ends(arch.num_layers, n) is not None]
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    context = [n for n in _divisors(world) if n == 1 or longest / n >= _PIECE]
    expert = [n for n in _divisors(world) if arch.experts is not None and arch.experts.count % n == 0] or [1]
    for tp, pp, cp, ep in itertools.product(
        choices("parallel.tensor_model_parallel_size", tensor),
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
            replicated = world > tp * pp
            reduced = own.overlap_grad_reduce if "parallel.overlap_grad_reduce" in keep else replicated
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
                overlap_grad_reduce=reduced or own.overlap_param_gather,  # which needs it
            )
            distributed = config.optimizer.distributed if "optimizer.distributed" in keep else replicated
            layers = divisions.groups(arch.num_layers, parallel, config.memory)
            yield replace(
                config,
                parallel=parallel,
                memory=replace(config.memory, recompute_num_layers=layers),
                optimizer=replace(config.optimizer, distributed=distributed),
            )


def _divisors(number: int) -> list[int]:
    return [n for n in divisors(number) if n & (n - 1) == 0 or number <= 64]
