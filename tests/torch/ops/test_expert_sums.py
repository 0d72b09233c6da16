"""Sums of experts' weights: whose they are, in whatever order and parts, and what is said where they differ (1 s)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_hpc.data.records import Floats
from gspo_hpc.ops import expert_sums
from gspo_hpc.training.agreement.experts import misplaced

LAYERS, EXPERTS = 3, 16


def weights(dtype: torch.dtype, scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gate and up projections [experts, 2 x 48, 64], and down projections [experts, 64, 48], of each layer."""
    drawn = torch.Generator().manual_seed(5)
    shapes = ((EXPERTS, 96, 64), (EXPERTS, 64, 48))
    return [
        tuple((scale * torch.randn(shape, generator=drawn)).to(dtype) for shape in shapes)  # type: ignore[misc]
        for _ in range(LAYERS)
    ]


def held(layers: list[tuple[torch.Tensor, torch.Tensor]], experts: list[int]) -> list[expert_sums.Held]:
    """Return the answer of a worker that has these experts, in this order."""
    found: list[expert_sums.Held] = []
    for number, (w13, w2) in enumerate(layers):
        sums = torch.cat([expert_sums.of_experts(w13), expert_sums.of_experts(w2)], 1)
        found.append((number, experts, sums.numpy().tobytes()))
    return found


def whole(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> Floats:
    return expert_sums.added([held(layers, list(range(EXPERTS)))], LAYERS, EXPERTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_parts_and_other_orders_have_the_same_sums(dtype: torch.dtype, scale: float) -> None:
    layers = weights(dtype, scale)
    ours = whole(layers)
    halves = [[(w13[:, rows], w2[..., columns]) for w13, w2 in layers] for rows, columns in HALVES]
    cut = [held(half, list(range(EXPERTS))) for half in halves]
    assert misplaced(ours, expert_sums.added(cut, LAYERS, EXPERTS)) == ""
    shuffled = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    turned = [(w13[:, shuffled].mT, torch.nn.functional.pad(w2, (0, 16))) for w13, w2 in layers]
    assert misplaced(ours, whole(turned)) == ""
    split = [
        held([(w13[some], w2[some]) for w13, w2 in layers], some) for some in ([9, 3, 4], [*range(3), *range(5, 9)])
    ]
    found = expert_sums.added(split, LAYERS, EXPERTS)
    assert misplaced(ours, found) == "" and np.isnan(found).all(-1).sum() == LAYERS * 6
    assert np.isnan(expert_sums.added([], LAYERS, EXPERTS)).all()


HALVES = ((slice(None, None, 2), slice(0, 24)), (slice(1, None, 2), slice(24, 48)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_not_in_their_places_are_named(dtype: torch.dtype) -> None:
    layers = weights(dtype)
    ours = whole(layers)
    layers[1][0][[2, 7]] = layers[1][0][[7, 2]]
    layers[1][1][[2, 7]] = layers[1][1][[7, 2]]
    assert misplaced(ours, whole(layers)) == (
        "expert 2 of layer 1 has those of the trainer's expert 7, "
        "expert 7 of layer 1 has those of the trainer's expert 2"
    )
    layers[2][1][4] *= 1.01
    layers[2][0][5] = 0.0
    assert misplaced(ours, whole(layers)).endswith(
        ", expert 4 of layer 2 has those of none of the trainer's, and 1 more are wrong"
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_told_where_the_trainer_has_numbers(value: float, workers: int) -> None:
    """NaN also stands for what nobody says, and must not be taken for it, nor lost where workers add their parts."""
    layers = weights(torch.bfloat16)
    ours = whole(layers)
    layers[1][0][2, 0, 0] = value
    parts = [[(w13[:, rows], w2[..., columns]) for w13, w2 in layers] for rows, columns in HALVES[:workers]]
    found = whole(layers) if workers == 1 else expert_sums.added([held(p, list(range(EXPERTS))) for p in parts], 3, 16)
    assert misplaced(ours, found) == "expert 2 of layer 1 has those of none of the trainer's"
    assert misplaced(found, found) == "", "the trainer has them too: no engine put them there"


@pytest.mark.parametrize("part", [0, 1])
def test_either_projection_alone_shows(part: int) -> None:
    layers = weights(torch.bfloat16)
    ours = whole(layers)
    layers[0][part][[0, 15]] = layers[0][part][[15, 0]]
    assert "expert 0 of layer 0 has those of none" in misplaced(ours, whole(layers))


def test_a_text_gives_the_same_bits_again() -> None:
    sums = whole(weights(torch.bfloat16))
    sums[1] = np.nan
    again = expert_sums.from_text(expert_sums.to_text(sums), LAYERS)
    assert again.tobytes() == sums.tobytes() and again.shape == sums.shape
    with pytest.raises(ValueError, match="base64|padding|reshape"):
        expert_sums.from_text("no", LAYERS)


def test_experts_that_the_model_does_not_have_are_left_out() -> None:
    """Some kernels compute a shared expert with the routed ones, in a place behind them."""
    layers = weights(torch.float32)
    found = expert_sums.added([held(layers, list(range(EXPERTS)))], LAYERS, EXPERTS - 2)
    assert found.tobytes() == whole(layers)[:, : EXPERTS - 2].tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 16])
def test_a_few_experts_at_a_time_give_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(weights(torch.bfloat16))
    monkeypatch.setattr(expert_sums, "_AT_ONCE", count * 96 * 64)
    assert whole(weights(torch.bfloat16)).tobytes() == expected.tobytes()
