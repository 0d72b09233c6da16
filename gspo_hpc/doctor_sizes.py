"""What a run needs of memory and disk, as far as the config and the model's config.json tell it.

Floor 6. Bounds from below, of what is known: activations, caches of libraries and allocators come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc import model_config, model_memory
from gspo_hpc.config import Config
from gspo_hpc.passes import offload_trainer

_QUEUE = (
    10 * 16 * 2**20
)  # vLLM's message queue to the workers of one engine: ten chunks of 16 MiB, where it has several
_NCCL = 32 * 2**20  # of NCCL for a rank, among those of one node; an estimate, its buffers depend on channels and peers
_BASE = 16 * 2**20  # semaphores and the like


@dataclass(frozen=True)
class Sizes:
    """Bytes."""

    rank_gpu: int  # weights, gradients, optimizer of the rank that has most of them, as far as they are on the GPU
    host: int  # memory of a node
    checkpoint: int  # one checkpoint of the whole run
    shm: int  # /dev/shm of a node


def of(config: Config) -> Sizes | None:
    """None where there is no model, or its sizes or layout are not to be had."""
    if config.model.path is None:
        return None
    try:
        arch = model_config.read(config.model.path)
        stages = range(config.parallel.pipeline_model_parallel_size)
        parts = [model_memory.state(arch, config, stage) for stage in stages]
    except (ValueError, OSError, ArithmeticError):  # told by the checks of the model and of the plan
        return None
    largest = max(parts, key=lambda part: part.total)
    cuda, memory = config.cluster.platform == "cuda", config.memory
    ranks = config.cluster.gpus_per_node
    count = model_memory.parameters(arch)
    if cuda:
        host = (largest.total if offload_trainer(config) else largest.optimizer * memory.offload_optimizer) * ranks
        host += sleeping(config) * engines(config) * count * _width(config)
        gpu = largest.total - largest.optimizer * memory.offload_optimizer
    else:
        cache = int(config.rollout.kv_cache_gb * 2**30)
        host = largest.total * ranks + engines(config) * (count * _width(config) + cache)
        gpu = 0
    if config.checkpoint.async_save:  # a copy is written while training goes on
        host += (largest.weights + largest.optimizer) * ranks
    wide = config.model.dtype == "float32"
    return Sizes(gpu, host, count * (12 if wide else 14), shm_needed(config))


def engines(config: Config) -> int:
    """On one node."""
    return config.rollout.engines_per_node or max(
        1, config.cluster.gpus_per_node // config.rollout.tensor_parallel_size
    )


def sleeping(config: Config) -> bool:
    """Whether engines keep their weights in host memory while the trainer works."""
    return config.cluster.platform == "cuda" and config.rollout.mode == "colocate" and config.rollout.sleep_level == 1


def _width(config: Config) -> int:
    """Bytes of a weight in an engine."""
    return 4 if (config.rollout.dtype or config.model.dtype) == "float32" else 2


def shm_needed(config: Config) -> int:
    """/dev/shm of a node. Weights do not travel through it."""
    queues = engines(config) * _QUEUE if config.rollout.tensor_parallel_size > 1 else 0
    several = config.cluster.platform == "cuda" and config.cluster.gpus_per_node > 1
    return _BASE + queues + (_NCCL * config.cluster.gpus_per_node if several else 0)
