"""Loading of experts inside vLLM's workers, many at a time.

vLLM takes a checkpoint's tensors one by one: it keeps them until their layer is complete, and loads each of them twice,
first to count its elements. A layer of 128 experts has 384, so this takes longer than their bytes, and all of them are
in memory whole, though a worker needs its share only. Here a stack of experts' tensors goes straight into a layer's
memory, by vLLM's own loader, which cuts out the worker's share; a layer that is complete is then processed as usual.
On CPUs experts are packed for the kernel on the way, where that is possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from gspo_hpc.engine.experts import compat

_SHARDS = {  # vLLM's names of what a Hugging Face tensor is
    **{"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"},
    **{"w1.weight": "w1", "w3.weight": "w3", "w2.weight": "w2"},
}


class ExpertLoader:
    """The layers of experts of a model, in one weight update."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = compat.expert_layers(model)
        self._packed: dict[str, compat.PackedLayer | None] = {}  # of layers that have begun
        self._places: dict[str, list[int]] = {}  # of layers that have begun: for each expert its place, or -1
        self._missing: dict[str, set[tuple[str, int]]] = {}  # of layers that are not complete: shard and expert

    def load(self, name: str, numbers: Sequence[int], stack: torch.Tensor) -> bool:
        """Load tensors [experts, ...] of the experts with these numbers; return False where vLLM must take each.

        Raises ValueError for one that came before.
        """
        prefix, _, kind = name.partition(".{}.")
        layer, shard = self._layers.get(prefix), _SHARDS.get(kind)
        if layer is None or shard is None:
            return False
        if prefix not in self._places:
            self._places[prefix] = places = compat.expert_places(layer)
            self._missing[prefix] = {(one, n) for one in ("w1", "w2", "w3") for n, at in enumerate(places) if at >= 0}
            self._packed[prefix] = compat.packed_layer(layer) if places else None
            if places and self._packed[prefix] is None:
                compat.materialize(layer)
        places, missing, packed = self._places[prefix], self._missing[prefix], self._packed[prefix]
        if not places:
            return False
        for begin, end in _runs(numbers, places):
            came = {(shard, number) for number in numbers[begin:end]}
            if not came <= missing:
                raise ValueError(f"{name} was sent twice")
            first = numbers[begin]
            if packed is not None:
                packed.load(places[first], shard, stack[begin:end])
            else:
                parameter = "w2_weight" if shard == "w2" else "w13_weight"
                compat.load_experts(layer, parameter, places[first], shard, first, stack[begin:end])
            missing -= came
        if not missing:
            if packed is not None:
                packed.finish()
            else:
                compat.process(layer)
        return True

    def finish(self) -> None:
        """Raise ValueError if a layer is not complete."""
        for prefix, missing in self._missing.items():
            if missing:
                raise ValueError(f"layer {prefix}: {len(missing)} expert tensors were not sent")


def _runs(numbers: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of experts that lie one after the other in this worker's memory."""
    ends = [
        at
        for at, (one, other) in enumerate(itertools.pairwise(numbers), 1)
        if other != one + 1 or places[one] < 0 or places[other] != places[one] + 1
    ]
    for begin, end in itertools.pairwise([0, *ends, len(numbers)]):
        if places[numbers[begin]] >= 0:
            yield begin, end
