"""The bytes that an engine takes of each of its GPUs: weights, working memory, cache, and what never sleeps."""

from __future__ import annotations

from gspo_hpc.config.derived import engine_itemsize
from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import adapters, devices, parameters
from gspo_hpc.system.text import GIB

# A figure of experience: a vLLM worker's own context, CUDA graphs and workspaces, which sleeping does not free.
ENGINE = int(1.5 * GIB)


def engine_parts(arch: Architecture, config: Config, device: devices.Device) -> dict[str, int]:
    """Return the bytes that a worker of vLLM holds: it fills its share of the card with cache."""
    tp, item = config.rollout.tensor_parallel_size, engine_itemsize(config)
    weights = weights_bytes(arch, config)
    tokens = int(engine_setting(config, "max_num_batched_tokens"))
    inner = arch.ffn_hidden_size if arch.experts is None else arch.experts.top_k * arch.experts.ffn_hidden_size
    working = int(tokens * (4 * arch.hidden_size + 3 * inner / tp) * item)
    working += min(tokens, int(engine_setting(config, "max_num_seqs"))) * arch.vocab_size * 4  # logits, in fp32
    share = engine_setting(config, "gpu_memory_utilization")
    cache = max(0, int(device.memory * share) - weights - working - ENGINE)
    return {"engine_weights": weights, "engine_working": working, "engine_asleep": ENGINE, "kv_cache": cache}


def weights_bytes(arch: Architecture, config: Config) -> int:
    """Return the bytes of an engine's weights on each of its GPUs, with its places for adapters."""
    weights = parameters.of_engine(arch, config.rollout.tensor_parallel_size) * engine_itemsize(config)
    return weights + adapters.of_engine(arch, config)


def engine_bytes(arch: Architecture, config: Config, device: devices.Device, tokens: int) -> int:
    """Return the bytes that an engine takes of each of its GPUs, with a cache that holds this many tokens."""
    found = engine_parts(arch, config, device)
    return sum(found.values()) - found["kv_cache"] + tokens * cache_bytes_per_token(arch, config)


def cache_tokens(arch: Architecture, config: Config, device: devices.Device) -> int:
    """Return the tokens that the cache of an engine holds, as an estimate has them."""
    return tokens_in(arch, config, engine_parts(arch, config, device))


def tokens_in(arch: Architecture, config: Config, engine: dict[str, int]) -> int:
    """Return the tokens that the cache of an engine with these parts holds."""
    return engine["kv_cache"] // max(1, cache_bytes_per_token(arch, config))


def cache_bytes_per_token(arch: Architecture, config: Config) -> int:
    """Return the bytes of one token in the cache of one GPU. Heads that are fewer than an engine's GPUs are copied."""
    heads = max(1, arch.num_key_value_heads // config.rollout.tensor_parallel_size)
    item = engine_itemsize(config)
    if arch.mixers:
        each = (mixer.cache // min(config.rollout.tensor_parallel_size, mixer.cache_heads) for mixer in arch.mixers)
        return sum(each) * item
    return 2 * arch.num_layers * heads * arch.head_dim * item
