"""The size of a rank's part of the model: exact parameters, and bytes of weights, gradients and optimizer.

Megatron-Core keeps gradients in one buffer a kind of parameter (beside experts' own), in fp32 or
in the model's dtype; Adam two fp32 moments of every parameter, and an fp32 master where the parameter has 16 bits. A
distributed optimizer shares moments and masters over the ranks that have the same parameters. What activations, logits
and communication take in addition is not in these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import divisions


@dataclass(frozen=True)
class Count:
    """Parameters of one rank, by the ranks that share them."""

    dense: int  # all but those of experts that are on ranks of their own
    experts: int

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int  # moments, and masters of 16-bit parameters

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.weights + self.gradients + self.optimizer


def parameters(arch: Architecture) -> int:
    """Return the parameters of the whole model, a tied embedding counted once."""
    everything = _layers(arch, range(arch.num_layers), 1, 1, 1) + _ends(arch, 1, first=True, last=True)
    return everything.dense + everything.experts


def of_engine(arch: Architecture, ranks: int) -> int:
    """Return the parameters on each of the GPUs of an engine: key-value heads fewer than these are copied."""
    copied = max(0, ranks - arch.num_key_value_heads) * 2 * arch.head_dim * (arch.hidden_size + arch.qkv_bias)
    return (parameters(arch) + arch.num_layers * copied) // ranks


def layers_of(arch: Architecture, config: Config, stage: int) -> list[int]:
    """Return the layers of a pipeline stage, counted from 0 over all stages."""
    return divisions.layers_of_stage(arch.num_layers, config.parallel, stage)


def of_rank(arch: Architecture, config: Config, stage: int) -> Count:
    """Return the parameters of one rank of a pipeline stage. The layout must be one that the plan accepts."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    return _layers(arch, layers_of(arch, config, stage), tp, ep, etp) + _ends(
        arch, tp, first=stage == 0, last=stage == pp - 1
    )


def state(arch: Architecture, config: Config, stage: int) -> Bytes:
    """Return what one rank of a pipeline stage keeps of the model between two steps, with nothing offloaded."""
    parallel, count = config.parallel, of_rank(arch, config, stage)
    tp, pp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
    )
    number = count.dense + count.experts
    wide = config.model.dtype == "float32"
    gradient = 4 if wide or config.optimizer.grad_reduce_in_fp32 else 2
    each = 8 if wide else 12
    if config.optimizer.distributed:
        world = config.world_size or 1
        sharing = world // (tp * pp)  # data-parallel and context-parallel ranks
        experts = world // ((parallel.expert_tensor_parallel_size or tp) * ep * pp)
        optimizer = each * (-(-count.dense // sharing) - (-count.experts // experts))
    else:
        optimizer = each * number
    return Bytes(number * (4 if wide else 2), number * gradient, optimizer)


def _layers(arch: Architecture, layers: range | list[int], tp: int, ep: int, etp: int) -> Count:
    hidden, size = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * size, 2 * arch.num_key_value_heads * size
    attention = (queries + keys) * (hidden + arch.qkv_bias) // tp + queries * hidden // tp
    attention += 2 * size * arch.qk_norm + 2 * hidden  # norms
    mixing = attention * len(layers)
    if arch.mixers:
        mixing = sum(arch.mixers[layer].split // tp + arch.mixers[layer].whole + 2 * hidden for layer in layers)
    mixed = sum(map(arch.has_experts, layers)) if arch.experts is not None else 0
    plain = len(layers) - mixed
    total = Count(mixing + 3 * hidden * arch.ffn_hidden_size // tp * plain, 0)
    if experts := arch.experts:
        gate = hidden * (experts.shared_gate and bool(experts.shared_ffn_hidden_size))
        shared = 3 * hidden * experts.shared_ffn_hidden_size // tp + gate
        own = experts.count // ep * (3 * hidden * experts.ffn_hidden_size // etp + experts.biases)
        total += Count((hidden * experts.count + experts.router_biases + shared) * mixed, own * mixed)
    return total


def _ends(arch: Architecture, tp: int, *, first: bool, last: bool) -> Count:
    """Count embedding, head, its norm, and the part that sees. A tied head on a stage of its own is a copy."""
    vocabulary = -(-arch.vocab_size // tp) * arch.hidden_size  # padded, so that ranks have equally many rows
    heads = int(last and not (arch.tie_word_embeddings and first))
    return Count(vocabulary * (first + heads) + arch.hidden_size * last + arch.vision_parameters * first, 0)
