"""Mixtures of experts: Megatron-Core's settings for them, their layer, and their routers.

Experts are Megatron's: one after the other (SequentialMLP), which runs on the CPU and without Transformer Engine, or
all of a rank at once by grouped matrix products. Its all-to-all dispatcher, or DeepEP's kernels (flex), bring tokens to
the experts and back: both take any number of tokens from each rank, and no token is ever dropped. Its third dispatcher,
allgather, wants equally many tokens from each rank, which packed samples do not have: Megatron refuses it with
variable_seq_lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.policy import compat
from gspo_hpc.policy.router_replay import RouterReplay, Routing

compat.allow_routers_without_transformer_engine()

_DTYPES = {"float32": "fp32", "float64": "fp64", None: None}


class Router(compat.ReplayableRouter):
    """Megatron's router, whose choices of experts can be replayed, recorded and counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices = RouterReplay(self.config.num_moe_experts, torch.cuda.current_device())
        self.replay(self.choices)


def settings(arch: Architecture, config: Config, fused: bool) -> dict[str, Any]:
    """Return the arguments of Megatron's TransformerConfig that concern experts, for models with or without them."""
    # Megatron refuses its default dispatcher, allgather, with samples of any length, experts or not.
    common: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    experts, options = arch.experts, config.moe
    if experts is None:
        return common
    return common | {
        "moe_token_dispatcher_type": options.token_dispatcher,
        "moe_flex_dispatcher_backend": "deepep",  # read with flex only
        "num_moe_experts": experts.count,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,  # Transformer Engine's kernels, which need no index on the host
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.num_layers)],
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_ffn_hidden_size > 0,
        "moe_router_pre_softmax": not experts.normalize_top_k,  # else over the chosen, which makes them add up to one
        "moe_router_dtype": _DTYPES[options.router_dtype],
        "moe_router_load_balancing_type": "aux_loss" if options.aux_loss_coeff else "none",
        "moe_aux_loss_coeff": options.aux_loss_coeff,
        "moe_z_loss_coeff": options.z_loss_coeff or None,
    }


def layer_spec(arch: Architecture, fused: bool) -> Any:
    """Return the module specification of experts, in place of a layer's MLP.

    With `fused` it is Transformer Engine's, which multiplies all experts of a rank at once.
    """
    assert arch.experts is not None
    spec = get_moe_module_spec(use_te=fused, num_experts=arch.experts.count, moe_grouped_gemm=fused)
    compat.moe_submodules(spec).router = Router
    return spec


def routing(chunks: Sequence[torch.nn.Module]) -> Routing:
    """Return the routers of this rank's part of the model, to replay and record their choices."""
    config = getattr(chunks[0], "config")  # noqa: B009 (torch types modules' attributes as tensors)
    routers = [
        (chunk, module.layer_number - 1, module.choices)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Router)
    ]
    return Routing(routers, config.num_layers, config.moe_router_topk)
