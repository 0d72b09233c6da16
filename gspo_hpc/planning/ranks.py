"""The place of each rank: its node, its GPU, its place in Megatron's groups, and the engine that runs on its GPU.

Ranks are dealt to nodes in blocks, and counted in Megatron-Core's order "tp-cp-ep-dp-pp":
neighbours differ in their tensor-parallel place first, pipeline stages are farthest apart. Attention and experts cut
the same ranks in two ways: rank = TP + tp x (CP + cp x (DP + dp x PP)) = ETP + etp x (EP + ep x (EDP + edp x PP)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Seat(NamedTuple):
    """One rank. Everything is counted from 0; `gpu` within the node, `engine` over all nodes."""

    rank: int
    node: int
    gpu: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    expert_dp: int
    engine: int | None  # None: no engine generates on this GPU


class Dimension(NamedTuple):
    """One kind of group: how many ranks each has, how far these are apart, over how many nodes it reaches at most."""

    name: str  # a field of Seat
    size: int
    apart: int
    nodes: int


def engine_gpus(layout: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the GPUs of a node for each engine that has some there. GPUs set apart for engines are the last."""
    gpus, engines, size = _engine_node(layout), layout["engines_per_node"], layout["rollout_tensor_parallel_size"]
    size //= layout.get("nodes_per_engine", 1)
    apart, each = layout.get("gpus_set_apart_per_node", 0), size + layout.get("reward_model_gpus_per_engine", 0)
    first, spacing = (gpus - apart, each) if apart else (0, each if layout.get("generation_nodes") else gpus // engines)
    return [tuple(range(first + i * spacing, first + i * spacing + size)) for i in range(engines)]


def first_engine(layout: Mapping[str, int], node: int) -> int:
    """Return the number, over all nodes, of the first engine of a node."""
    return node * layout["engines_per_node"] // layout.get("nodes_per_engine", 1)


def check(layout: Mapping[str, int]) -> None:
    """Raise ValueError if the grids of a layout do not tile its ranks, or engines do not fit on their node."""
    if not {"data_parallel_size", "expert_data_parallel_size", "engines_per_node"} <= layout.keys():
        raise ValueError("ranks cannot be placed: a rule of the grid or of the engines is broken")
    gpus, engines, size = _engine_node(layout), layout["engines_per_node"], layout["rollout_tensor_parallel_size"]
    over, nodes = layout.get("nodes_per_engine", 1), layout.get("generation_nodes") or layout["nodes"]
    size += layout.get("reward_model_gpus_per_engine", 0)
    if engines * size > gpus * over or nodes % over:
        raise ValueError("ranks cannot be placed: engines do not fit on their node")


def _engine_node(layout: Mapping[str, int]) -> int:
    """Return the GPUs of a node that has engines."""
    return layout.get("generation_gpus_per_node", layout["gpus_per_node"])


def ranks_per_node(layout: Mapping[str, int]) -> int:
    """Return how many GPUs of a node train."""
    return layout["gpus_per_node"] - layout.get("gpus_set_apart_per_node", 0)


def training_nodes(layout: Mapping[str, int]) -> int:
    """Return the nodes that train: the first ones, where others only generate."""
    return layout["nodes"] - layout.get("generation_nodes", 0)


def seats(layout: Mapping[str, int]) -> list[Seat]:
    """Return every rank of a layout, in order. ValueError if its grids do not tile the ranks or engines do not fit."""
    check(layout)
    each = ranks_per_node(layout)
    engine_of = {gpu: number for number, gpus in enumerate(engine_gpus(layout)) for gpu in gpus}
    if layout.get("generation_nodes"):
        engine_of = {}
    grid = [(name, apart, size) for name, apart, size in strides(layout)]

    def place(rank: int) -> Seat:
        node, gpu = divmod(rank, each)
        at = {name: rank // apart % size for name, apart, size in grid}
        engine = engine_of.get(gpu)
        return Seat(rank, node, gpu, **at, engine=None if engine is None else first_engine(layout, node) + engine)

    return [place(rank) for rank in range(training_nodes(layout) * each)]


def dimensions(layout: Mapping[str, int]) -> list[Dimension]:
    """Return the kinds of groups of a layout, nearest ranks first: attention's, then experts'.

    This takes no longer for more ranks. Raises ValueError as `seats` does.
    """
    check(layout)
    each = ranks_per_node(layout)
    world = training_nodes(layout) * each
    return [Dimension(name, size, apart, _nodes(apart, size, each, world)) for name, apart, size in strides(layout)]


def _nodes(apart: int, size: int, each: int, world: int) -> int:
    """Return how many nodes of `each` ranks the farthest group reaches over: it begins latest on its node."""
    if apart >= each:
        return size
    block = apart * size  # as many groups as ranks are apart share one; blocks begin on nodes alike after a while
    starts = (number * block % each for number in range(min(world // block, each // math.gcd(each, block))))
    latest = max(min(each - 1, start + apart - 1) for start in starts)
    return (latest + (size - 1) * apart) // each + 1


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers with runs of neighbours folded: 0-3, or 0-1,6-7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def strides(layout: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return (field of Seat, distance of neighbours in its groups, size of these) for each kind of group."""
    found = []
    for grid in (
        (("tp", "tensor_model"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline_model")),
        (("etp", "expert_tensor"), ("ep", "expert_model"), ("expert_dp", "expert_data")),
    ):
        apart = 1
        for name, key in grid:
            size = layout[f"{key}_parallel_size"]
            found.append((name, apart, size))
            apart *= size
    return found
