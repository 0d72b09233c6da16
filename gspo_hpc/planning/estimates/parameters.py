"""The size of a rank's part of the model, and of what a node keeps of it in its own memory.

A rank's are exact parameters, and bytes of weights, gradients and optimizer. Where adapters are trained, these alone
have gradients, moments and masters; the model's own weights are in its dtype, and no checkpoint has them.

Megatron-Core keeps gradients in one buffer a kind of parameter (beside experts' own), in fp32 or
in the model's dtype; Adam two fp32 moments of every parameter, and an fp32 master where the parameter has 16 bits. A
distributed optimizer shares moments and masters over the ranks that have the same parameters. What activations, logits
and communication take in addition is not in these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gspo_hpc.config.constants import SAVE_TRANSIT_BYTES
from gspo_hpc.config.derived import (
    engine_gpus_per_node,
    engines_per_node,
    offloaded_parts,
    reference_is_base,
    restarts_generators,
    teacher_config,
    trains_adapters,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import adapters, devices
from gspo_hpc.system.text import GIB

_PROCESSES = 4 * GIB  # a figure of experience: what a rank with its engine takes for its code
_VOCABULARY_BLOCK = 64  # rows: vLLM's DEFAULT_VOCAB_PADDING_SIZE
REPLAYED = ("experts_to_replay", "experts_of_engines")  # parts of a node's memory, of trainers and of engines
_REMEMBERED = 4096  # sizes of parts of models: layouts that are tried one after another have them in common
_STATE = 16  # bytes that a trained parameter takes at least, over all ranks: weight, gradient and Adam's state


@dataclass(frozen=True)
class Count:
    """Parameters of one rank, by the ranks that share them."""

    dense: int  # all but those of experts that are on ranks of their own
    experts: int

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.experts + other.experts)


class Bytes(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int  # moments, and masters of 16-bit parameters
    gradient_copies: int = 0  # in fp32, of gradients in 16 bits: only while the optimizer steps

    @property
    def total(self) -> int:
        """The sum of what stays between two steps."""
        return self.weights + self.gradients + self.optimizer


@lru_cache(maxsize=_REMEMBERED)
def parameters(arch: Architecture) -> int:
    """Return the parameters of the whole model without adapters, a tied embedding counted once."""
    everything = _layers(arch, range(arch.num_layers), 1, 1, 1) + _ends(arch, 1, first=True, last=True)
    return everything.dense + everything.experts


def least_state(arch: Architecture, config: Config) -> int:
    """Return the bytes that all ranks together take at least of weights, gradients and optimizer."""
    if trains_adapters(config):
        return parameters(arch) * _item(config) + _STATE * adapters.of_model(arch, config)
    return _STATE * parameters(arch)


def of_engine(arch: Architecture, ranks: int) -> int:
    """Return the parameters on each of the GPUs of an engine: key-value heads fewer than these are copied."""
    copied = max(0, ranks - arch.num_key_value_heads) * 2 * arch.head_dim * (arch.hidden_size + arch.qkv_bias)
    return (parameters(arch) + arch.num_layers * copied) // ranks


def layers_of(arch: Architecture, config: Config, stage: int) -> tuple[int, ...]:
    """Return the layers of a pipeline stage, counted from 0 over all stages."""
    return divisions.numbers_of_layers(arch.num_layers, config.parallel, stage)


@lru_cache(maxsize=_REMEMBERED)
def with_experts(arch: Architecture, layers: Sequence[int]) -> int:
    """Return how many of these layers have experts."""
    return sum(map(arch.has_experts, layers)) if arch.experts is not None else 0


def of_rank(arch: Architecture, config: Config, stage: int) -> Count:
    """Return the parameters of one rank of a pipeline stage, with adapters if there are any.

    The layout must be one that the plan accepts.
    """
    parallel, layers = config.parallel, layers_of(arch, config, stage)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    own = _own(arch, layers, tp, ep, etp, stage == 0, stage == pp - 1)
    return own + _of_adapters(arch, config, layers) if trains_adapters(config) else own


def trained_of_rank(arch: Architecture, config: Config, stage: int) -> Count:
    """Return those of a rank's parameters that updates change: all, or those of adapters."""
    adapted = trains_adapters(config)
    return _of_adapters(arch, config, layers_of(arch, config, stage)) if adapted else of_rank(arch, config, stage)


def _of_adapters(arch: Architecture, config: Config, layers: Sequence[int]) -> Count:
    """Count the adapters of these layers on one rank."""
    return Count(adapters.of_layers(arch, config, layers).total, adapters.of_experts(arch, config, layers).total)


def state(arch: Architecture, config: Config, stage: int) -> Bytes:
    """Return what one rank of a pipeline stage keeps of the model between two steps, with nothing offloaded."""
    every = of_rank(arch, config, stage)
    count = trained_of_rank(arch, config, stage)
    number = count.dense + count.experts
    gradient, share = _gradient(config), number
    if config.optimizer.distributed:
        dense, experts = _split(config)
        stage_ranks = _stage_ranks(config)
        share = -(-count.dense // (stage_ranks // dense)) - (-count.experts // (stage_ranks // experts))
    copies = 0 if gradient == 4 else 4 * share
    return Bytes((every.dense + every.experts) * _item(config), number * gradient, _adam(config) * share, copies)


def quantized(arch: Architecture, config: Config, stage: int, *, with_gradient: bool) -> int:
    """Return the bytes that Transformer Engine's layers keep in 8 bits of a rank's weights during a pass.

    A backward pass needs them transposed as well. Norms, routers and biases stay in 16 bits, and are less than a
    hundredth of what is counted here: all parameters of layers.
    """
    if config.model.fp8 is None:
        return 0
    parallel = config.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    ep = parallel.expert_model_parallel_size
    count = _layers(arch, layers_of(arch, config, stage), tp, ep, etp or tp)
    return (count.dense + count.experts) * (1 + with_gradient)


def unused_gradients(arch: Architecture, config: Config, stage: int) -> int:
    """Return the bytes of tensors that Transformer Engine gives to autograd in place of gradients of weights.

    Its layers add gradients to the buffers themselves. In the backward pass of a micro-batch it keeps one tensor, which
    holds nothing, of every shape of weights (policy/compat.py). Layers of torch, which `auto` takes where it is not
    installed or adapters are trained, and on GPUs before Ampere, have none.
    """
    wide, parallel = config.model.dtype == "float32", config.parallel
    used = config.model.layers == "transformer_engine" or (config.model.layers == "auto" and not wide)
    used = used and not trains_adapters(config) and devices.before_ampere(config.cluster) is None
    if not used or config.cluster.platform != "cuda":
        return 0
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    return _of_shapes(arch, layers_of(arch, config, stage), tp, etp or tp) * (4 if wide else 2)


@lru_cache(maxsize=_REMEMBERED)
def _of_shapes(arch: Architecture, layers: Sequence[int], tp: int, etp: int) -> int:
    """Return the elements of one tensor of every shape of weights."""
    hidden, queries = arch.hidden_size, arch.num_attention_heads * arch.head_dim
    shapes = set[tuple[int, int]]()
    if not arch.mixers:
        shapes |= {((queries + 2 * arch.num_key_value_heads * arch.head_dim) // tp, hidden), (hidden, queries // tp)}
    inner = {(arch.mlp_matrices - 1, arch.ffn_hidden_size // tp) for layer in layers if not arch.has_experts(layer)}
    if arch.experts is not None and any(map(arch.has_experts, layers)):
        widths = {arch.experts.ffn_hidden_size // etp, arch.experts.shared_ffn_hidden_size // tp} - {0}
        inner |= {(2, width) for width in widths}
    for first, width in inner:
        shapes |= {(first * width, hidden), (hidden, width)}
    elements = sum(map(math.prod, shapes))
    if arch.mixers:  # all that ranks cut of a layer, of each kind
        elements += sum({arch.mixers[layer].split // tp for layer in layers})
    return elements


def copied_by_node(arch: Architecture, config: Config, stage: int) -> int:
    """Return the bytes of the copy that a node makes to save it in the background, if all its ranks are of this stage.

    A reference that is refreshed is copied like the weights. Of adapters' model nothing else is copied.

    Of ranks that have the same weights one copies them. A distributed optimizer's state is copied by all, each its
    part.
    """
    if trains_adapters(config):
        return _copied_of_adapters(arch, config, stage)
    count = of_rank(arch, config, stage)
    if arch.tie_word_embeddings and 0 < stage == config.parallel.pipeline_model_parallel_size - 1:
        head = -(-arch.vocab_size // config.parallel.tensor_model_parallel_size) * arch.hidden_size
        count += Count(-head, 0)  # the first stage copies it
    dense, experts = (_copying(config, different) for different in _split(config))
    elements = count.dense * dense + count.experts * experts
    weights = _item(config) * elements * (2 if config.algorithm.moves_reference else 1)
    if config.optimizer.distributed:
        return weights + state(arch, config, stage).optimizer * config.training_gpus_per_node
    return weights + _adam(config) * elements


def _copied_of_adapters(arch: Architecture, config: Config, stage: int) -> int:
    """Return what `copied_by_node` does, of adapters: what tensor-parallel ranks all have is saved by the first."""
    layers, (tp, experts) = layers_of(arch, config, stage), _split(config)
    etp = config.parallel.expert_tensor_parallel_size or tp
    dense, mixed = adapters.of_layers(arch, config, layers), adapters.of_experts(arch, config, layers)
    elements = dense.cut * _copying(config, tp) + dense.whole * _copying(config, 1)
    elements += mixed.cut * _copying(config, experts) + mixed.whole * _copying(config, experts // etp)
    weights = _item(config) * elements * (2 if config.algorithm.moves_reference else 1)
    if config.optimizer.distributed:
        every = dense.cut * tp + dense.whole + mixed.cut * experts + mixed.whole * (experts // etp)
        elements = -(-every * config.training_gpus_per_node // _stage_ranks(config))
    return weights + _adam(config) * elements


def _copying(config: Config, different: int) -> int:
    """Return how many ranks of a node copy, where the first `different` of a stage have different weights."""
    ranks, block = config.training_gpus_per_node, _stage_ranks(config)
    return min(different, ranks) if block >= ranks else different * (ranks // block)


def of_node(
    arch: Architecture,
    config: Config,
    state: Bytes,
    engine: int,
    copy: int,
    sleep_level: int,
    experts: tuple[int, int] = (0, 0),
) -> dict[str, int]:
    """Return the host memory of a node in bytes, by use; of the kind that needs more, if some nodes only generate.

    `state` is what a rank keeps between steps, `engine` what an engine's weights take of each of its GPUs, `copy` what
    a node copies to save it in the background, `experts` what choices of experts take with trainers, and with engines.
    Engines that sleep at level 1 keep their weights in host memory, at level 2 only small tables.
    """
    processes = {"processes": _PROCESSES * config.cluster.gpus_per_node}
    trains, generates = _of_trainers(config, state, copy), _of_engines(arch, config, engine, sleep_level)
    for name, part, size in zip(REPLAYED, (trains, generates), experts, strict=True):
        part |= {name: size} if size else {}
    if config.cluster.generation_nodes:
        others = {"processes": _PROCESSES * config.gpus_per_engine_node}
        return max(processes | trains, others | generates, key=lambda found: sum(found.values()))
    return processes | trains | generates


def _of_trainers(config: Config, state: Bytes, copy: int) -> dict[str, int]:
    """Return the host memory of a node's ranks that train."""
    trainers = config.training_gpus_per_node
    if config.cluster.platform == "cpu":
        found = {"trainer": (state.total + state.gradient_copies) * trainers}
    else:
        found = _moved(config, state)
    if config.checkpoint.async_save:
        found["checkpoint_copy"] = copy
    if passing := transit(config, state):
        # What comes, and what is written; without copies in host memory what goes, too.
        buckets = 2 if config.checkpoint.async_save or config.cluster.platform == "cpu" else 3
        found["save_transit"] = buckets * passing * trainers
    if config.algorithm.has_teacher:
        stages = config.parallel.of_teacher().pipeline_model_parallel_size
        found["teacher"] = max(teacher_weights(config, one) for one in range(stages)) * trainers
    elif config.algorithm.kl_beta > 0 and not reference_is_base(config):
        weights = state.gradients // _gradient(config) * _item(config)  # of what is trained
        found["reference_and_policy"] = 2 * weights * trainers
    return found


def transit(config: Config, state: Bytes) -> int:
    """Return the bytes in which parts of an optimizer's state that ranks share go between them, to be saved or loaded.

    A batch has no more than all that a rank owns, but for the part of it that it holds.
    """
    if not config.optimizer.distributed:
        return 0
    parallel = config.parallel
    sharers = config.world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    return min(SAVE_TRANSIT_BYTES, state.optimizer * (sharers - 1) // sharers)


def teacher(config: Config) -> Architecture | None:
    """Return the architecture of the teacher; None where there is none, or nothing is known of it."""
    return architecture.find(teacher_config(config)) if config.algorithm.has_teacher else None


def teacher_weights(config: Config, stage: int) -> int:
    """Return the bytes of the teacher's weights on one rank of a pipeline stage; 0 where they are not known."""
    if (arch := teacher(config)) is None:
        return 0
    count = of_rank(arch, teacher_config(config), stage)
    return (count.dense + count.experts) * _item(config)


def _of_engines(arch: Architecture, config: Config, engine: int, sleep_level: int) -> dict[str, int]:
    """Return the host memory of a node's engines."""
    found = dict[str, int]()
    weights, engines = engine * engine_gpus_per_node(config), engines_per_node(config)
    if config.cluster.platform == "cpu":
        found |= {"engine_weights": weights, "kv_cache": int(config.rollout.kv_cache_gb * GIB) * engines}
    elif config.rollout.mode == "colocate":
        found["engine_weights_asleep"] = weights * (sleep_level == 1)
    if config.rollout.mode == "server":
        found["weights_kept_for_engines"] = parameters(arch) * _item(config) * (engines + restarts_generators(config))
    return found


def least(found: dict[str, int]) -> int:
    """Return the bytes that are certain: not what processes take, nor choices of experts, which may be fewer."""
    return sum(size for name, size in found.items() if name not in ("processes", *REPLAYED))


def _moved(config: Config, state: Bytes) -> dict[str, int]:
    """Return what leaves the GPUs of trainers for host memory. Gradients are dropped, not moved."""
    found = {}
    moved, trainers = offloaded_parts(config), config.training_gpus_per_node
    if moved:
        sizes = {"weights": state.weights, "optimizer": state.optimizer}
        found["trainer_offloaded"] = sum(size for name, size in sizes.items() if name in moved) * trainers
    if config.memory.offload_optimizer and "optimizer" not in moved:
        found["optimizer"] = state.optimizer * trainers
    return found


def _adam(config: Config) -> int:
    """Return the bytes that Adam keeps of a parameter: two moments, and a master where it has 16 bits."""
    return 8 if config.model.dtype == "float32" else 12


def _item(config: Config) -> int:
    """Return the bytes of a weight."""
    return 4 if config.model.dtype == "float32" else 2


def _gradient(config: Config) -> int:
    """Return the bytes of a gradient in Megatron's buffers."""
    return 4 if config.model.dtype == "float32" or config.optimizer.grad_reduce_in_fp32 else 2


def _split(config: Config) -> tuple[int, int]:
    """Return over how many ranks of a pipeline stage its dense parameters are split, and those of its experts."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    return tp, (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size


def _stage_ranks(config: Config) -> int:
    """Return the ranks of a pipeline stage."""
    return (config.world_size or 1) // config.parallel.pipeline_model_parallel_size


@lru_cache(maxsize=_REMEMBERED)
def _own(arch: Architecture, layers: Sequence[int], tp: int, ep: int, etp: int, first: bool, last: bool) -> Count:
    """Count these layers, and what else is on the first and the last stage."""
    return _layers(arch, layers, tp, ep, etp) + _ends(arch, tp, first=first, last=last)


def _layers(arch: Architecture, layers: Sequence[int], tp: int, ep: int, etp: int) -> Count:
    hidden, size = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * size, 2 * arch.num_key_value_heads * size
    attention = (queries + keys) * (hidden + arch.qkv_bias) // tp + queries * hidden // tp
    attention += 2 * size * arch.qk_norm + 2 * hidden  # norms
    mixing = attention * len(layers)
    if arch.mixers:
        mixing = sum(arch.mixers[layer].split // tp + arch.mixers[layer].whole + 2 * hidden for layer in layers)
    mixed = with_experts(arch, layers)
    plain = len(layers) - mixed
    total = Count(mixing + arch.mlp_matrices * hidden * arch.ffn_hidden_size // tp * plain, 0)
    if experts := arch.experts:
        gate = hidden * (experts.shared_gate and bool(experts.shared_ffn_hidden_size))
        shared = 3 * hidden * experts.shared_ffn_hidden_size // tp + gate
        own = experts.count // ep * (3 * hidden * experts.ffn_hidden_size // etp + experts.biases)
        total += Count((hidden * experts.count + experts.router_biases + shared) * mixed, own * mixed)
    return total


def _ends(arch: Architecture, tp: int, *, first: bool, last: bool) -> Count:
    """Count embedding, head, its norm, and what else is on the first stage. A tied head of its own stage is a copy."""
    vocabulary = -(-arch.vocab_size // tp) * arch.hidden_size  # padded, so that ranks have equally many rows
    heads = int(last and not (arch.tie_word_embeddings and first))
    return Count(vocabulary * (first + heads) + arch.hidden_size * last + arch.first_parameters * first, 0)


def waiting_vocabulary(arch: Architecture) -> int:
    """Return the elements of a vocabulary that each worker of vLLM keeps until a weight update ends.

    vLLM pads it to whole blocks of rows. The layer then never gets all of its elements, so it is loaded last, and what
    came for it, all rows of embedding and head, is kept so long.
    """
    if arch.vocab_size % _VOCABULARY_BLOCK == 0:
        return 0
    return (1 if arch.tie_word_embeddings else 2) * arch.vocab_size * arch.hidden_size
