"""Distances of changes from the run that was asked for: the nearest fixes are offered first."""

from __future__ import annotations

import difflib
import math
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from gspo_hpc.config.engine_arguments import ENGINE_DEFAULTS
from gspo_hpc.config.schema import Config, Model
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.rules import engine_arguments
from gspo_hpc.planning.settings import ENGINE

# How much a change of each setting changes the run: the distance of a change is this times the doublings.
_WEIGHTS: dict[str, float] = {
    "optimizer.distributed": 0.4,  # the same numbers, another place
    "memory.recompute_granularity": 0.6,
    "memory.offload_optimizer": 0.8,
    "memory.offload_trainer": 0.8,
    "rollout.sleep_level": 0.5,
    "checkpoint.async_save": 0.8,
    "moe.token_dispatcher": 0.5,
    "optimizer.grad_reduce_in_fp32": 2.5,
    "batch.micro_batch_size": 0.9,  # the same run in other pieces
    "batch.micro_batch_tokens": 0.9,
    "batch.global_batch_size": 1.0,
    "batch.generation_batch_size": 1.0,
    "batch.steps_per_generation": 1.1,
    "batch.num_generations": 1.2,
    "rollout.engines_per_node": 1.3,
    "rollout.tensor_parallel_size": 1.4,
    "rollout.max_prompt_length": 1.6,
    "rollout.max_response_length": 1.5,
    "parallel.sequence_parallel": 0.5,
    "parallel.expert_tensor_parallel_size": 1.7,
    "parallel.expert_model_parallel_size": 1.8,
    "parallel.context_parallel_size": 2.2,
    "parallel.tensor_model_parallel_size": 2.0,
    "parallel.pipeline_model_parallel_size": 2.1,
    "parallel.virtual_pipeline_model_parallel_size": 1.5,
    "parallel.num_layers_in_first_pipeline_stage": 1.3,
    "parallel.num_layers_in_last_pipeline_stage": 1.3,
    "rollout.engine.gpu_memory_utilization": 0.8,
    "rollout.engine.max_num_batched_tokens": 0.8,
    "rollout.engine.max_num_seqs": 0.8,
    "rollout.dtype": 1.0,
    "rollout.mode": 3.0,
    "cluster.nodes": 3.0,  # what one has is harder to change
    "cluster.gpus_per_node": 3.2,
    "cluster.generation_nodes": 1.4,
    "cluster.generation_gpus_per_node": 3.2,
    "cluster.gpu": 3.5,
    "cluster.gpu_memory_gb": 3.5,
    "model.path": 6.0,
    "slurm.time_minutes": 1.0,  # a longer job is the same run; a later signal may leave no time to save
}


class Size(IntEnum):
    """Size of a change by what it changes, the smallest first."""

    SWITCH = 0  # where or in what pieces the same numbers are computed
    LAYOUT = 1  # how the model is cut over the same GPUs
    BATCH = 2  # what is learned from
    HARDWARE = 3
    MODEL = 4


_SIZES = {
    **dict.fromkeys(("parallel.sequence_parallel", "parallel.overlap_param_gather"), Size.SWITCH),
    **dict.fromkeys(("parallel.overlap_grad_reduce", "batch.share_prompts"), Size.SWITCH),
    **dict.fromkeys(("batch.micro_batch_size", "batch.micro_batch_tokens"), Size.SWITCH),
    **dict.fromkeys(("batch.logprob_micro_batch_tokens", "batch.reference_micro_batch_tokens"), Size.SWITCH),
    **dict.fromkeys(("rollout.tensor_parallel_size", "rollout.engines_per_node", "rollout.mode"), Size.LAYOUT),
    "cluster.generation_nodes": Size.LAYOUT,  # what the nodes do that one has
    **dict.fromkeys(("rollout.max_prompt_length", "rollout.max_response_length"), Size.BATCH),
}
_SIZES_OF_SECTIONS = {
    "parallel": Size.LAYOUT,
    "batch": Size.BATCH,
    "data": Size.BATCH,
    "cluster": Size.HARDWARE,
}

# What counts where a setting is not given, if that is a number that does not depend on others; and one update of a
# rollout, which a size of rollouts makes more only where that is given in its place.
_NOT_GIVEN: dict[str, float] = {
    **{f"{ENGINE}{name}": number for name, number in ENGINE_DEFAULTS.items()},
    "batch.steps_per_generation": 1,
}

_OF_KIN, _UNLIKE = 0.3, 0.25  # of a degree of kinship between models, and of names that have no letter in common
MOVED = 0.05  # of a fix that gives what a config says another name
EACH_MORE = 0.2  # of every choice beside the first: one more setting is not worth a hundredth of another
_REWRITTEN, _LATER = 0.1, 0.01  # times the weight: the first number that a text may mean, and each one after it
_LEFT_OUT = 2.0  # times the weight


def size(key: str) -> Size:
    """Return how large a change of a setting is: a model is more than nodes, these more than a batch size."""
    if key == "model.path":
        return Size.MODEL
    return _SIZES.get(key, _SIZES_OF_SECTIONS.get(key.partition(".")[0], Size.SWITCH))


def is_of_machines(key: str) -> bool:
    """Return whether a change of a setting asks for other machines than one has, or for another model."""
    return size(key) >= Size.HARDWARE


def weight(key: str) -> float:
    """Return how much a doubling of a setting changes the run."""
    return _WEIGHTS.get(key, 2.0)


def between(key: str, before: Any, value: Any) -> float:
    """Return the distance of two values of a setting: its weight, times the doublings between numbers."""
    doubling, before = weight(key), start(key, before)
    if key.startswith(ENGINE) and before is not None:
        name = key.removeprefix(ENGINE)
        if value is None:  # what was given is lost
            return _LEFT_OUT * doubling
        if value in (likely := engine_arguments.meant(name, before)):  # written as vLLM takes it
            return (_REWRITTEN + _LATER * likely.index(value)) * doubling
        if not engine_arguments.takes(name, before):  # so it is no number that this one is near to
            return doubling
    if isinstance(before, int) and isinstance(value, int) and 0 in (before, value) and max(before, value) > 0:
        return doubling * (math.log2(max(before, value)) + 1.0)  # none is one less than 1: not nearer to 3 than 1 is
    if is_number(before) and is_number(value) and before > 0 and value > 0:
        return doubling * abs(math.log2(value / before))
    if isinstance(before, str) and isinstance(value, str):
        if key == "cluster.gpu":
            return _between_gpus(doubling, before, value)
        if key == "model.path":
            return _between_models(doubling, before, value)
    return doubling


def start(key: str, before: Any) -> Any:
    """Return the value from which distances count: the present one, or the number that counts where none is given."""
    return _NOT_GIVEN.get(key) if before is None else before


def is_rewritten(key: str, before: Any, value: Any) -> bool:
    """Return whether a value is what an argument of the engine says already, as vLLM takes it: 0.9 for 90%."""
    return key.startswith(ENGINE) and value in engine_arguments.meant(key.removeprefix(ENGINE), before)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _between_gpus(weight: float, before: str, value: str) -> float:
    """Return a distance by the ratio of their memory if both are known, else by how unlike their names are."""
    unlike = _unlike(before, value)
    try:
        memory, other = devices.find(before).memory, devices.find(value).memory
    except ValueError:  # a typing error
        return unlike
    return weight * abs(math.log2(other / memory)) + unlike


@cache
def _between_models(weight: float, before: str, value: str) -> float:
    """Return a distance by the ratio of their sizes if both are known, and by their kinship and names."""
    sizes = [parameters_of(name) for name in (before, value)]
    doublings = abs(math.log2(sizes[1] / sizes[0])) if sizes[0] and sizes[1] else 0.0
    apart = _OF_KIN * catalog.kinship(before, value) + _UNLIKE * _unlike(Path(before).name, Path(value).name)
    return weight * (0.5 + 0.5 * doublings + apart)


@cache
def parameters_of(path: str) -> int | None:
    """Return the parameters of a model; None if its sizes are not known."""
    arch = architecture.find(Config(model=Model(path=path)))
    return None if arch is None else parameters.parameters(arch)


def _unlike(one: str, other: str) -> float:
    return 1.0 - difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
