"""The constants of a worker's model, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gspo_hpc.engine.constants import compat
from gspo_hpc.ops import constants


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings."""

    size: int  # numbers of a head that are rotated
    by_halves: bool  # each number of the first half with that of the second; else with its neighbour
    rows: tuple[int, bytes, float]  # of their table; see gspo_hpc.ops.constants.some_rows


@dataclass(frozen=True)
class Held:
    """The constants of a model; each is there once for several layers with the same."""

    rotary: list[Rotary] = field(default_factory=list)
    attention: list[tuple[float, int, float]] = field(default_factory=list)  # scale, sliding window, bound of scores
    norm_eps: list[float] = field(default_factory=list)
    logits: list[tuple[float, float]] = field(default_factory=list)  # scale, bound


@torch.no_grad()
def of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the constants of a model as plain values."""
    rotary = {
        (module.rotary_dim, module.is_neox_style, constants.some_rows(module.cos_sin_cache))
        for module in compat.rotary_embeddings(model)
    }
    return {
        "rotary": sorted(rotary),
        "attention": sorted(compat.attention(model)),
        "norm_eps": sorted(compat.norms(model)),
        "logits": sorted(compat.logits(model)),
    }


def from_values(values: dict[str, Any]) -> Held:
    """Return what :func:`of` gave, also where lists came for tuples."""
    return Held(
        [Rotary(int(size), bool(halves), (rows[0], rows[1], rows[2])) for size, halves, rows in values["rotary"]],
        [(scale, window, bound) for scale, window, bound in values["attention"]],
        list(values["norm_eps"]),
        [(scale, bound) for scale, bound in values["logits"]],
    )
