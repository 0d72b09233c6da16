"""Tables of ranks: that of ``gspo-hpc plan``, short however many there are, and that of ``train --dry-run``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from gspo_hpc.cli.pages.render import grid
from gspo_hpc.planning.ranks import (
    dimensions,
    engine_gpus,
    first_engine,
    ranges,
    ranks_per_node,
    strides,
    training_nodes,
)

_MAX_ROWS = 32
_HEADS = {"tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "etp": "ETP", "ep": "EP", "expert_dp": "EDP"}


def page(layout: Mapping[str, int], every: bool = False) -> Iterator[RenderableType]:
    """Yield how ranks are counted, how far groups reach, and a table of ranks.

    A row of the table is one rank, or a node's ranks, or those of as many nodes as make a short table; with `every`, it
    is always one rank. Raises ValueError if ranks cannot be placed. Rows are finished lines: rich takes seconds for ten
    thousand, and has nothing to wrap in them.
    """
    found, each = dimensions(layout), ranks_per_node(layout)
    nodes = training_nodes(layout)
    world = nodes * each
    expert_names = ("etp", "ep", "expert_dp")
    experts = layout["expert_model_parallel_size"] > 1 or (
        layout["expert_tensor_parallel_size"] != layout["tensor_model_parallel_size"]
    )
    shown = [item for item in found if item.size > 1 and (experts or item.name not in expert_names)]
    grids = [("order", [item for item in found if item.name not in expert_names])]
    if experts:
        grids.append(("experts", [item for item in found if item.name in (*expert_names, "pp")]))
    counted = []
    for head, parts in grids:
        terms = [f"{item.apart} x {_HEADS[item.name]}" for item in parts if item.size > 1]
        terms.sort(key=lambda term: int(term.split()[0]))
        counted.append((head, f"rank = {' + '.join(terms).replace('1 x ', '', 1) if terms else '0'}"))
    for item in shown:
        where = "inside a node" if item.nodes == 1 else f"over {item.nodes} nodes"
        groups = world // item.size
        count = f"{groups:,} group{'s' * (groups > 1)}"
        counted.append((_HEADS[item.name], f"{count} of {item.size:,} ranks, {item.apart:,} apart, {where}"))
    over = layout.get("nodes_per_engine", 1)
    where = "on every node" if over == 1 else f"each over {over} nodes"
    if nodes < layout["nodes"]:
        where = f"on the nodes that only generate, {_span(nodes, layout['nodes'] - 1)}"
    counted.append(("engines", f"{where}: GPUs {' | '.join(map(ranges, engine_gpus(layout)))}"))
    if more := layout.get("reward_model_gpus_per_engine"):
        behind = (range(own[-1] + 1, own[-1] + 1 + more) for own in engine_gpus(layout))
        counted.append(("reward models", f"{where}: GPUs {' | '.join(map(ranges, behind))}"))
    yield grid(counted)
    yield ""
    names = ["node", "gpu", *(item.name for item in shown), "engine"]
    rows = [["ranks", *(_HEADS.get(name, name.replace("gpu", "GPU")) for name in names)]]
    size = 1 if every else _rows_of(world, each, nodes)
    for first in range(0, world, size):
        last = min(first + size, world) - 1
        rows.append([_span(first, last), *(_values(layout, name, first, last) for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _rows_of(world: int, node: int, nodes: int) -> int:
    """Return the ranks of a row: one, a node's, or those of as many whole nodes as leave few rows."""
    if world <= _MAX_ROWS:
        return 1
    few = -(-nodes // _MAX_ROWS)
    even = next((count for count in range(few, 2 * few) if nodes % count == 0), few)
    return node * even  # a prime number of nodes has a shorter last row


def _values(layout: Mapping[str, int], name: str, first: int, last: int) -> str:
    """Return what ranks `first` to `last`, one or those of whole nodes, have in a column: computed, not looked up."""
    each = ranks_per_node(layout)
    if name == "node":
        return _span(first // each, last // each)
    if name == "engine":
        others = training_nodes(layout) < layout["nodes"]  # that only generate
        own = [] if others else [number for number, gpus in enumerate(engine_gpus(layout)) if gpus[0] < each]
        if first == last:
            own = [number for number in own if first % each in engine_gpus(layout)[number]]
            return str(first_engine(layout, first // each) + own[0]) if own else "-"
        last_engine = first_engine(layout, last // each) + layout["engines_per_node"] - 1
        return _span(first_engine(layout, first // each), last_engine) if own else "-"
    apart, size = (1, each) if name == "gpu" else next(at[1:] for at in strides(layout) if at[0] == name)
    low, high = first // apart, last // apart
    return _span(0, size - 1) if high - low >= size - 1 else ranges(number % size for number in range(low, high + 1))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def places(found: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Yield the table of `gspo-hpc train --dry-run`: each rank's place, and the parameters that it would hold."""
    names = ["rank", "node", "local_rank", "tp", "pp", "cp", "dp", "ep", "etp", "expert_dp", "parameters"]
    rows = [[_HEADS.get(name, name.replace("_", " ")) for name in names]]
    for one in found:
        count = "not known" if one["parameters"] is None else f"{one['parameters']:,}"
        generates = one["tp"] is None  # and has no place among the ranks that train
        place = ("-" if one[name] is None else str(one[name]) for name in names[:-1])
        rows.append([*place, "generates" if generates else count])
    yield grid(rows, "rlrrrrrrrrr", wrapped=0)
