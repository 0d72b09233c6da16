"""Sums of the experts' weights that this rank trains; see :mod:`gspo_hpc.ops.expert_sums`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops import expert_sums
from gspo_hpc.policy import weight_stream
from gspo_hpc.policy.model import PackedGPTModel


@torch.no_grad()
def sums(chunks: Sequence[PackedGPTModel], arch: Architecture, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the sums [layers, experts, NUMBERS] of all experts' weights in `dtype`, on the CPU; None without experts.

    They are NaN in layers without experts. Adapters are merged, unless they are turned off. Collective among the ranks
    that share the model.
    """
    if arch.experts is None:
        return None
    device = next(iter(chunks[0].parameters())).device
    found = torch.zeros(arch.num_layers, arch.experts.count, expert_sums.NUMBERS, device=device)
    for entry, weight in weight_stream.own_experts(chunks, arch):
        layer = expert_sums.layer_of(entry.hf[0])
        assert layer is not None and entry.expert is not None, entry
        first = 0 if len(entry.hf) == 2 else 2  # gate and up projections, or down projection
        place = found[layer, entry.expert, first : first + 2]
        place.copy_(expert_sums.of_experts(weight.to(dtype)[None])[0])
    dist.all_reduce(found, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    found = found.cpu()
    found[[not arch.has_experts(layer) for layer in range(arch.num_layers)]] = torch.nan
    return found
