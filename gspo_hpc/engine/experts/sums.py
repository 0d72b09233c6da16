"""Sums of the experts' weights that a worker of vLLM computes with."""

from __future__ import annotations

import torch

from gspo_hpc.engine.experts import compat
from gspo_hpc.ops import expert_sums


@torch.no_grad()
def held(model: torch.nn.Module) -> list[expert_sums.Held]:
    """Return the sums of the experts that this worker has, or of its part of each; see gspo_hpc.ops.expert_sums.

    Layers whose weights are quantized, or that have copies of some experts, are left out.
    """
    found: list[expert_sums.Held] = []
    for name, layer in compat.layers_with_weights(model).items():
        number = expert_sums.layer_of(name)
        places = compat.expert_places(layer)
        if number is None or not places:
            continue
        sums = torch.cat([expert_sums.of_experts(compat.weights(layer, kind)) for kind in ("w13", "w2")], 1).cpu()
        mine = {expert: place for expert, place in enumerate(places) if place >= 0}
        found.append((number, list(mine), sums[list(mine.values())].numpy().tobytes()))
    return found
