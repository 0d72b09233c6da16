"""The memory and disk that a run needs at least, by its config and the model's config.json.

These are lower bounds: activations, caches of libraries and allocators are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.config.constants import NCCL_BYTES
from gspo_hpc.config.derived import engine_gpus_per_node, engine_itemsize, engines_per_node, offloaded_parts
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.system.text import GIB

# vLLM's message queue to the workers of one engine, if it has several: ten chunks of 16 MiB.
_QUEUE = 10 * 16 * 2**20
_BASE = 16 * 2**20  # semaphores and the like


@dataclass(frozen=True)
class Sizes:
    """Numbers of bytes."""

    rank_gpu: int  # weights, gradients and optimizer state on the GPU, of the rank that has most
    host: int  # memory of a node
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
    except (ValueError, OSError, ArithmeticError):  # the checks of the model and of the plan report it
        return None
    largest = max(parts, key=lambda part: part.total)
    cuda, memory = config.cluster.platform == "cuda", config.memory
    ranks = config.cluster.gpus_per_node
    count = parameters.parameters(arch)
    if cuda:
        moved = offloaded_parts(config)
        kept = largest.optimizer * (memory.offload_optimizer or "optimizer" in moved)
        kept += largest.weights * ("weights" in moved) + largest.gradients * ("gradients" in moved)
        host = kept * ranks
        asleep = engine_gpus_per_node(config) * count // config.rollout.tensor_parallel_size
        host += sleeping(config) * asleep * engine_itemsize(config)
        gpu = largest.total - largest.optimizer * memory.offload_optimizer
    else:
        cache = int(config.rollout.kv_cache_gb * GIB)
        host = largest.total * ranks + engines_per_node(config) * (count * engine_itemsize(config) + cache)
        gpu = 0
    if config.checkpoint.async_save:  # a copy is written while training goes on
        host += (largest.weights + largest.optimizer) * ranks
    wide = config.model.dtype == "float32"
    return Sizes(gpu, host, count * (12 if wide else 14), shm_needed(config))


def sleeping(config: Config) -> bool:
    """Return whether engines keep their weights in host memory while the trainer works."""
    return config.cluster.platform == "cuda" and config.rollout.mode == "colocate" and config.rollout.sleep_level == 1


def shm_needed(config: Config) -> int:
    """Return the bytes of /dev/shm that a node needs. Weights do not travel through it."""
    queues = engines_per_node(config) * _QUEUE if config.rollout.tensor_parallel_size > 1 else 0
    several = config.cluster.platform == "cuda" and config.cluster.gpus_per_node > 1
    return _BASE + queues + (NCCL_BYTES * config.cluster.gpus_per_node if several else 0)
