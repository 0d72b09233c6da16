"""The memory and disk that a run needs at least, by its config and the model's config.json.

These are lower bounds: activations, caches of libraries and allocators are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.config.constants import NCCL_BYTES
from gspo_hpc.config.derived import engines_per_node
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import adapters, memory, parameters

# vLLM's message queue to the workers of one engine, if it has several: ten chunks of 16 MiB.
_QUEUE = 10 * 16 * 2**20
_BASE = 16 * 2**20  # semaphores and the like


@dataclass(frozen=True)
class Sizes:
    """Numbers of bytes."""

    rank_gpu: int  # weights, gradients and optimizer state on the GPU, of the rank that has most
    host: int  # memory of a node: what the plan counts with, without what processes take for themselves
    checkpoint: int  # one checkpoint of the whole run
    shm: int  # /dev/shm of a node


def of(config: Config) -> Sizes | None:
    """Return the sizes of a run; None without a model, or if its sizes or layout are not valid."""
    if config.model.path is None:
        return None
    try:
        arch = architecture.read(config.model.path)
        stages = range(config.parallel.pipeline_model_parallel_size)
        parts = [parameters.state(arch, config, stage) for stage in stages]
        node = parameters.least(memory.of_node(arch, config))
    except (ValueError, OSError, ArithmeticError):  # the checks of the model and of the plan report it
        return None
    largest = max(parts, key=lambda part: part.total)
    gpu = largest.total - largest.optimizer * config.memory.offload_optimizer
    gpu *= config.cluster.platform == "cuda"
    count = adapters.of_model(arch, config) or parameters.parameters(arch)
    wide = config.model.dtype == "float32"
    return Sizes(gpu, node, count * (12 if wide else 14), shm_needed(config))


def sleeping(config: Config) -> bool:
    """Return whether engines keep their weights in host memory while the trainer works."""
    return config.cluster.platform == "cuda" and config.rollout.mode == "colocate" and config.rollout.sleep_level == 1


def shm_needed(config: Config) -> int:
    """Return the bytes of /dev/shm that a node needs. Weights do not travel through it."""
    queues = engines_per_node(config) * _QUEUE if config.rollout.tensor_parallel_size > 1 else 0
    gpus = max(config.cluster.gpus_per_node, config.gpus_per_engine_node)
    several = config.cluster.platform == "cuda" and gpus > 1
    return _BASE + queues + (NCCL_BYTES * gpus if several else 0)
