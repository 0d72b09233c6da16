"""The sizes of a rank's adapters, beside weights that are frozen.

They are those of policy/adapters/lora.py. Of a layer that tensor-parallel ranks cut by rows, B is cut with it and A
whole on every rank; of one that is cut by columns, and of the embedding, it is the reverse. Where there are more ranks
than key-value heads, B of queries, keys and values is whole as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from gspo_hpc.config.constants import LORA_RANKS, MERGED_ROWS
from gspo_hpc.config.derived import engine_itemsize, trains_adapters
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.config.schema import Config
from gspo_hpc.models.adapter_table import (
    AdaptedLinear,
    AdapterPart,
    adapted_linears,
    chosen,
    embedding,
    examples,
    kinds,
)
from gspo_hpc.models.architecture import Architecture

_FP32 = 4  # bytes
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))  # layers of vLLM


class Elements(NamedTuple):
    """Elements of adapters on one rank."""

    cut: int  # of matrices of which every tensor-parallel rank has a part
    whole: int  # of those that all of these ranks have

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.cut + self.whole


def of_layers(arch: Architecture, config: Config, layers: Sequence[int]) -> Elements:
    """Return the elements of a rank that has these layers, without those of experts; none without adapters.

    A rank that has layer 0 has the embedding, too.
    """
    cut, whole = _summed(arch, config, layers, experts=False)
    size, rank = config.parallel.tensor_model_parallel_size, config.adapter.rank
    for part in _of_embedding(arch, config) if 0 in layers else []:
        cut, whole = cut + rank * -(-part.inputs // size), whole + rank * part.outputs
    return Elements(cut, whole)


def _of_embedding(arch: Architecture, config: Config) -> list[AdapterPart]:
    linears = embedding(arch, config.adapter.targets) if trains_adapters(config) else []
    return [part for linear in linears for part in linear.parts]


def of_experts(arch: Architecture, config: Config, layers: Sequence[int]) -> Elements:
    """Return the elements of a rank's experts; `cut` and `whole` are meant over the ranks that share an expert."""
    return _summed(arch, config, layers, experts=True)


def _summed(arch: Architecture, config: Config, layers: Sequence[int], *, experts: bool) -> Elements:
    if not trains_adapters(config):
        return Elements(0, 0)
    parallel, adapter, mixed = config.parallel, config.adapter, sum(map(arch.has_experts, layers))
    size, each = parallel.tensor_model_parallel_size, 1
    if experts:
        size = parallel.expert_tensor_parallel_size or size
        each = arch.experts.count // parallel.expert_model_parallel_size if arch.experts is not None else 0
    cut = whole = 0
    for layer in examples(arch):
        count = mixed if arch.has_experts(layer) else len(layers) - mixed
        one = _of_layer(arch, adapter.targets, adapter.rank, layer, size, experts)
        cut, whole = cut + one.cut * count * each, whole + one.whole * count * each
    return Elements(cut, whole)


@lru_cache(maxsize=1024)
def _of_layer(
    arch: Architecture, targets: tuple[str, ...], rank: int, layer: int, size: int, experts: bool
) -> Elements:
    """Return the elements of one layer, or of one of its experts, on one of `size` ranks that share it."""
    shared = arch.num_key_value_heads < size
    cut = whole = 0
    for linear, part_inputs, part_outputs in _parts(arch, targets, layer, experts=experts):
        if linear.cut == "columns":
            cut, whole = cut + rank * part_inputs // size, whole + rank * part_outputs
        elif linear.cut == "qkv" and shared:
            whole += rank * (part_inputs + part_outputs)
        else:
            cut, whole = cut + rank * part_outputs // size, whole + rank * part_inputs
    return Elements(cut, whole)


class Low(NamedTuple):
    """Elements of a token between the two matrices of a layer's adapters, which are kept for the second one.

    Those of `projection` and `down`, which are cut by columns, have a rank's own tokens where sequence parallelism
    gives it a part of them.
    """

    attention: int  # of queries, keys and values
    projection: int
    mlp: int  # of gate and up
    down: int


def low(config: Config) -> Low:
    """Return what the adapters of one layer keep between their matrices."""
    rank, chosen_ones = config.adapter.rank, targets(config)
    groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    return Low(*(rank * len(chosen_ones.intersection(group)) for group in groups))


def joined(arch: Architecture, config: Config, layers: Sequence[int]) -> int:
    """Return the elements of the copies of A that a micro-batch keeps: those of a layer's parts are joined.

    Of a layer of experts it has those of each expert of the rank.
    """
    if not trains_adapters(config):
        return 0
    parallel, targets = config.parallel, config.adapter.targets
    tp, mixed = parallel.tensor_model_parallel_size, sum(map(arch.has_experts, layers))
    etp, ep = parallel.expert_tensor_parallel_size or tp, parallel.expert_model_parallel_size
    total = 0
    for layer in examples(arch):
        count = mixed if arch.has_experts(layer) else len(layers) - mixed
        total += count * _inputs(arch, targets, layer, tp, experts=False)
        if arch.has_experts(layer) and arch.experts is not None:
            total += count * (arch.experts.count // ep) * _inputs(arch, targets, layer, etp, experts=True)
    return config.adapter.rank * total


@lru_cache(maxsize=1024)
def _inputs(arch: Architecture, targets: tuple[str, ...], layer: int, size: int, *, experts: bool) -> int:
    """Return the inputs of the adapters of one layer, or of one of its experts, on one of `size` ranks."""
    parts = _parts(arch, targets, layer, experts=experts)
    return sum(inputs // (size if linear.cut == "columns" else 1) for linear, inputs, _ in parts)


def of_model(arch: Architecture, config: Config) -> int:
    """Return the parameters of all adapters of a model; 0 where none are trained."""
    alone = config.adapter.rank * sum(part.inputs + part.outputs for part in _of_embedding(arch, config))
    return _whole(arch, config, experts=False) + experts_of_model(arch, config) + alone


def experts_of_model(arch: Architecture, config: Config) -> int:
    """Return the parameters of the adapters of all experts of a model."""
    return _whole(arch, config, experts=True) * (arch.experts.count if arch.experts is not None else 0)


def _whole(arch: Architecture, config: Config, *, experts: bool) -> int:
    if not trains_adapters(config):
        return 0
    adapter, layers = config.adapter, range(arch.num_layers)
    mixed, total = sum(map(arch.has_experts, layers)), 0
    for layer in examples(arch):
        count = mixed if arch.has_experts(layer) else len(layers) - mixed
        total += _of_layer(arch, adapter.targets, adapter.rank, layer, 1, experts).total * count
    return total


def merging(arch: Architecture, config: Config) -> int:
    """Return the bytes that a rank takes to merge adapters into the largest weight that has any, for engines.

    Beside the weight there are the product of the two matrices and the sum, both in fp32, and the weight itself in
    fp32 where it has 16 bits. The embedding's is made block by block of its rows, and is whole at the end.
    """
    if not trains_adapters(config) or adapters_beside_weights(config, experts=arch.experts is not None):
        return 0
    parallel, wide = config.parallel, config.model.dtype == "float32"
    tp = parallel.tensor_model_parallel_size
    largest = 0
    for layer in examples(arch):
        for linear in kinds(arch, config.adapter.targets, layer):
            part, size = linear.parts[0], tp if linear.expert is None else parallel.expert_tensor_parallel_size or tp
            rows = {
                "qkv": (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim,
                "gate_up": 2 * part.outputs,
            }.get(linear.cut, part.outputs)
            largest = max(largest, rows * part.inputs // size)
    each = _FP32 * (2 if wide else 3)
    found = largest * each
    for part in _of_embedding(arch, config):
        rows, own = -(-part.inputs // tp), _FP32 if wide else 2
        found = max(found, part.outputs * (rows * own + min(rows, MERGED_ROWS) * each))
    return found


def of_engine(arch: Architecture, config: Config) -> int:
    """Return the bytes of an engine's places for adapters on each of its GPUs; 0 where it gets them merged, or none.

    vLLM has places for all parts of a layer that it fuses, at the next of its ranks. As in the trainer, A or B is whole
    on every GPU.
    """
    if not adapters_beside_weights(config, experts=arch.experts is not None):
        return 0
    rank = next(one for one in LORA_RANKS if one >= config.adapter.rank)
    size, names = config.rollout.tensor_parallel_size, set(targets(config))
    for fused in _FUSED:
        names |= fused if names & fused else set()
    elements = 0
    for linear in adapted_linears(arch, tuple(names), 0):
        for part in linear.parts:
            if linear.cut == "columns":
                elements += part.inputs // size + part.outputs
            else:  # keys and values have no more parts than heads
                heads = min(size, arch.num_key_value_heads) if part.target in ("k_proj", "v_proj") else size
                elements += part.inputs + part.outputs // heads
    return rank * elements * arch.num_layers * engine_itemsize(config)


def travelling(arch: Architecture, config: Config) -> int:
    """Return the bytes that reach an engine in a weight sync where only adapters do; 0 where all weights do."""
    if not adapters_beside_weights(config, experts=arch.experts is not None):
        return 0
    return of_model(arch, config) * (4 if config.model.dtype == "float32" else 2)


def targets(config: Config) -> frozenset[str]:
    """Return the layers that have adapters."""
    return frozenset(chosen(config.adapter.targets)) if trains_adapters(config) else frozenset()


def _parts(
    arch: Architecture, targets: Sequence[str], layer: int, *, experts: bool
) -> Iterator[tuple[AdaptedLinear, int, int]]:
    """Yield the linear layers of one layer, or of one of its experts, with their inputs and outputs."""
    for linear in kinds(arch, targets, layer):
        if (linear.expert is not None) == experts:
            for part in linear.parts:
                yield linear, part.inputs, part.outputs
