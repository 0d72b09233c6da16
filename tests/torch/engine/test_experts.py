"""Stacks of experts' tensors go to the right places of a worker's layer, each exactly once; vLLM is stood in for.

That vLLM's own loader takes them is shown with real engines in tests/engine and tests/gloo.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.engine.experts import compat, loader

KINDS = {"w1": "gate_proj.weight", "w2": "down_proj.weight", "w3": "up_proj.weight"}
LAYER = "model.layers.3.mlp.experts"


class Layer(torch.nn.Module):
    """A worker's layer of experts: for each, one number a kind."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.found = {kind: torch.full((held,), float("nan")) for kind in KINDS}
        self.processed = 0


def loader_of(patch: pytest.MonkeyPatch, layer: Layer, places: list[int]) -> loader.ExpertLoader:
    """Return a loader whose only layer is `layer`."""

    def load(layer: Any, name: str, place: int, shard: str, first: int, stack: torch.Tensor) -> None:
        assert name == ("w2_weight" if shard == "w2" else "w13_weight") and places[first] == place
        layer.found[shard][place : place + len(stack)] = stack[:, 0]

    def process(layer: Any) -> None:
        layer.processed += 1

    patch.setattr(compat, "expert_layers", lambda model: {LAYER: layer})
    patch.setattr(compat, "expert_places", lambda layer: places)
    patch.setattr(compat, "packed_layer", lambda layer: None)
    patch.setattr(compat, "materialize", lambda layer: None)
    patch.setattr(compat, "load_experts", load)
    patch.setattr(compat, "process", process)
    return loader.ExpertLoader(layer)


def stack(numbers: list[int], kind: str) -> torch.Tensor:
    return torch.tensor([[10.0 * number + int(kind[1])] for number in numbers])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """Return the places of experts on a worker, and stacks that hold each expert's three tensors, in any division."""
    count = draw(st.integers(1, 9))
    order = draw(st.permutations(range(count))) if draw(st.booleans()) else list(range(count))
    held = draw(st.integers(1, count))
    places = [place if place < held else -1 for place in order]
    stacks = []
    for kind in KINDS:
        numbers = draw(st.permutations(range(count))) if draw(st.booleans()) else list(range(count))
        cuts = sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {0, count})
        stacks += [(kind, list(numbers[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
    return places, draw(st.permutations(stacks))


@given(cases())
@settings(max_examples=80, deadline=None)
def test_every_expert_comes_to_its_place(case: tuple[list[int], list[tuple[str, list[int]]]]) -> None:
    places, stacks = case
    layer = Layer(max(places) + 1)
    with pytest.MonkeyPatch.context() as patch:
        loader = loader_of(patch, layer, places)
        for kind, numbers in stacks:
            assert loader.load(f"{LAYER}.{{}}.{KINDS[kind]}", numbers, stack(numbers, kind))
        loader.finish()
    assert layer.processed >= 1
    for kind, found in layer.found.items():
        for number, place in enumerate(places):
            assert place < 0 or found[place] == 10 * number + int(kind[1])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([("w1", [0, 1]), ("w1", [1, 2])], "was sent twice"),
        ([("w1", [0, 1, 2]), ("w2", [0, 1, 2]), ("w3", [0, 2])], "1 expert tensors were not sent"),
        ([("w1", [0, 1, 2]), ("w2", [0, 1, 2]), ("w3", [0, 1, 2]), ("w2", [1])], "was sent twice"),
    ],
)
def test_a_doubled_or_missing_expert_is_found(
    sent: list[tuple[str, list[int]]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(monkeypatch, Layer(3), [0, 1, 2])
    with pytest.raises(ValueError, match=message):  # noqa: PT012
        for kind, numbers in sent:
            loader.load(f"{LAYER}.{{}}.{KINDS[kind]}", numbers, stack(numbers, kind))
        loader.finish()


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("model.layers.4.mlp.experts.{}.up_proj.weight", [0]),
        (f"{LAYER}.{{}}.up_proj.bias", [0]),
        (f"{LAYER}.{{}}.w1.weight", []),
    ],
)
def test_what_is_not_known_is_left_to_vllm(name: str, places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is no plain layer of experts, another kind of tensor, copies of experts."""
    loader = loader_of(monkeypatch, Layer(1), places)
    assert not loader.load(name, [0], torch.zeros(1, 1))
    loader.finish()


EXPERTS, HIDDEN, INNER = 3, 64, 96


def cpu_layer(patch: pytest.MonkeyPatch, kernel: dict[str, torch.Tensor], tp_rank: int = 0) -> SimpleNamespace:
    """Return a layer that vLLM's kernel for the CPU computes with `kernel`, as it is while weights are reloaded."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts = object.__new__(CPUUnquantizedExperts)
    experts._use_zentorch = False
    method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    patch.setattr(compat, "_kernel_parameters", lambda layer: kernel)
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in kernel.items()}
    return SimpleNamespace(quant_method=method, moe_config=SimpleNamespace(tp_rank=tp_rank), **empty)


@pytest.mark.parametrize("workers", [1, 3])
def test_experts_that_are_packed_as_they_come_are_those_that_vllm_packs(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker's share, bit for bit; also where the tensors of a stack do not lie one after the other."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    size = INNER // workers
    rows = torch.randn(EXPERTS, 2, INNER, 2 * HIDDEN)[..., ::2]
    gate, up, down = rows[:, 0], rows[:, 1], torch.randn(EXPERTS, INNER, HIDDEN).transpose(1, 2)
    for rank in range(workers):
        own = slice(rank * size, (rank + 1) * size)
        kernel = {
            "w13_weight": torch.full((EXPERTS, 2 * size, HIDDEN), torch.nan),
            "w2_weight": torch.full((EXPERTS, HIDDEN, size), torch.nan),
        }
        packed = compat.packed_layer(cpu_layer(monkeypatch, kernel, rank))
        assert packed is not None
        for shard, tensors in (("w1", gate), ("w2", down), ("w3", up)):
            packed.load(0, shard, tensors[:2])
            packed.load(2, shard, tensors[2:])
        w13, w2 = torch.cat([gate[:, own], up[:, own]], 1), down[:, :, own].contiguous()
        assert torch.equal(kernel["w13_weight"], cpu_prepack_moe_weight(w13, "vec"))
        assert torch.equal(kernel["w2_weight"], cpu_prepack_moe_weight(w2, "vec"))


def test_what_the_kernel_pads_or_packs_otherwise_goes_vllms_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"w13_weight": torch.empty(EXPERTS, 128, HIDDEN), "w2_weight": torch.empty(EXPERTS, HIDDEN, 64)}
    layer = cpu_layer(monkeypatch, kernel)
    layer.w2_weight = layer.w2_weight[..., :48]
    assert compat.packed_layer(layer) is None, "the checkpoint has 48 columns, which the kernel pads"
    layer = cpu_layer(monkeypatch, kernel)
    layer.quant_method.moe_kernel.fused_experts._use_zentorch = True
    assert compat.packed_layer(layer) is None
    layer = cpu_layer(monkeypatch, kernel)
    layer.quant_method.moe_kernel.fused_experts = SimpleNamespace()
    assert compat.packed_layer(layer) is None, "another kernel"
    monkeypatch.setattr(compat, "_packs_halves_apart", lambda *_: False)
    assert compat.packed_layer(cpu_layer(monkeypatch, kernel)) is None
