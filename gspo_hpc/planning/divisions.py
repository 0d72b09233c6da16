"""Divisions that libraries can make: of heads among tensor-parallel ranks, of layers among pipeline stages.

The conditions are those of Megatron-Core 0.16.1 and vLLM 0.32; tests hold them against both.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from gspo_hpc.config.schema import Memory, Parallel, replace
from gspo_hpc.models.architecture import Architecture


class _Pipeline(NamedTuple):
    """The settings that divide layers among stages."""

    stages: int
    chunks: int | None
    first: int | None  # layers of the first stage, where they are set
    last: int | None


def kv_heads_fit(kv_heads: int, ranks: int) -> bool:
    """Return whether each rank has equally many key-value heads, or each head equally many ranks."""
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def trainer_divides_heads(arch: Architecture, ranks: int) -> bool:
    """Return whether Megatron-Core can share attention among this many ranks.

    Each holds equally many rows of the matrix of queries, keys and values, also where that cuts a head.
    """
    rows = (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim
    heads = arch.num_attention_heads % ranks == 0 and kv_heads_fit(arch.num_key_value_heads, ranks)
    return heads and rows % ranks == 0


def engine_divides_heads(arch: Architecture, ranks: int) -> bool:
    """Return whether vLLM can share attention among this many GPUs: key-value heads fewer than these are copied."""
    return arch.num_attention_heads % ranks == 0 and kv_heads_fit(arch.num_key_value_heads, ranks)


def layers_per_stage(layers: int, parallel: Parallel) -> list[int] | None:
    """Return the layers of each pipeline stage; None where Megatron-Core does not divide them so.

    The first and the last stage have as many as is set for them, the others share the rest evenly. Each chunk of a
    virtual pipeline has equally many of its stage's. With two stages whose layers are both set, Megatron-Core counts
    the layers of a virtual pipeline by dividing by the number of stages between them, which is 0.
    """
    found = _counts(layers, _pipeline(parallel))
    return None if found is None else list(found)


def _pipeline(parallel: Parallel) -> _Pipeline:
    return _Pipeline(
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.num_layers_in_first_pipeline_stage,
        parallel.num_layers_in_last_pipeline_stage,
    )


@lru_cache(maxsize=4096)
def _counts(layers: int, pipeline: _Pipeline) -> tuple[int, ...] | None:
    stages, chunks = pipeline.stages, pipeline.chunks
    ends = [(0, pipeline.first), (stages - 1, pipeline.last)]
    given = {(stage, count) for stage, count in ends if count is not None}
    counts = dict(given)
    others, left = stages - len(counts), layers - sum(counts.values())
    if stages > layers or len(counts) < len(given) or left < 0 or (left > 0) != (others > 0) or left % max(1, others):
        return None
    found = tuple(counts.get(stage, left // max(1, others)) for stage in range(stages))
    if chunks is not None and (any(count % chunks for count in found) or (stages == len(counts) == 2)):
        return None
    return found


def layers_of_stage(layers: int, parallel: Parallel, stage: int) -> list[int]:
    """Return the layers of a pipeline stage, counted from 0 over all stages; ValueError where they are not divided."""
    return list(numbers_of_layers(layers, parallel, stage))


def numbers_of_layers(layers: int, parallel: Parallel, stage: int) -> tuple[int, ...]:
    """Return what `layers_of_stage` does, as a key for caches."""
    return _numbers(layers, _pipeline(parallel), stage)


@lru_cache(maxsize=4096)
def _numbers(layers: int, pipeline: _Pipeline, stage: int) -> tuple[int, ...]:
    counts, chunks = _counts(layers, pipeline), pipeline.chunks or 1
    if counts is None:
        raise ValueError(f"{layers} layers cannot be divided among the pipeline stages that parallel sets")
    first, own = sum(counts[:stage]) // chunks, counts[stage] // chunks
    return tuple(chunk * (layers // chunks) + first + layer for chunk in range(chunks) for layer in range(own))


Ends = tuple[int | None, int | None]  # layers of the first stage and of the last; None: as many as the others


def even_ends(layers: int, stages: int) -> Ends | None:
    """Return what to set for both ends so that stages differ least, the last stage, with the head, the smallest.

    That is nothing where the stages divide the layers. None: there are fewer layers than stages.
    """
    if layers < stages:
        return None
    if layers % stages == 0:
        return None, None
    between = -(-layers // stages)
    while stages > 2 and layers - (stages - 2) * between < 2:  # each end has a layer at least
        between -= 1
    both = layers - max(0, stages - 2) * between
    first, last = -(-both // 2), both // 2
    if stages == 2:
        return None, last
    return (None if first == between else first), (None if last == between else last)


def ends(layers: int, stages: int, given: Parallel) -> Ends:
    """Return what to set for both ends of a pipeline of this many stages: what is given for as many, if that is valid.

    A virtual pipeline is given up.
    """
    if stages == given.pipeline_model_parallel_size:
        plain = replace(given, virtual_pipeline_model_parallel_size=None)
        if layers_per_stage(layers, plain) is not None:
            return given.num_layers_in_first_pipeline_stage, given.num_layers_in_last_pipeline_stage
    return even_ends(layers, stages) or (None, None)


def end_candidates(layers: int, parallel: Parallel) -> tuple[set[int], set[int]]:
    """Return numbers of layers of the first and of the last stage with which stages differ little.

    They are those of even ends, and those that, alone or beside what is set for the other end, leave an even share to
    every other stage.
    """
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    given = (parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage)
    found: tuple[set[int], set[int]] = (set(), set())
    if layers % chunks or stages == 1:
        return found
    for own, values in enumerate(found):
        for beside in {None, given[1 - own]}:
            others = stages - 1 - (beside is not None)
            values.add(_evenest(layers // chunks - (beside or 0) // chunks, others) * chunks)
        values.add(((even_ends(layers // chunks, stages) or (None, None))[own] or 0) * chunks)
        values.discard(0)
    return found


def _evenest(layers: int, others: int) -> int:
    """Return how many layers a stage has beside others with an equal share each, so that they differ least; or 0."""
    if others == 0:
        return max(0, layers)
    shares = (layers // (others + 1), layers // (others + 1) + 1)
    own = [layers - share * others for share in shares if 0 < share * others < layers]
    return min(own, key=lambda one: (abs(one * (others + 1) - layers), one), default=0)


def groups(layers: int, parallel: Parallel, memory: Memory) -> int:
    """Return the layers to be computed again at a time: as many as are set, or as every stage has whole groups of."""
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    counts = [count // chunks for count in layers_per_stage(layers, parallel) or [chunks]]
    wanted = min(memory.recompute_num_layers, max(counts))
    if memory.recompute_method == "block":
        return wanted
    return next(count for count in range(wanted, 0, -1) if math.gcd(*counts) % count == 0)
