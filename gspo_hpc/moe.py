"""Mixtures of experts: what Megatron-Core is told of them.

Floor 3. Experts are Megatron's: one after the other (SequentialMLP), which runs on the CPU and without Transformer
Engine, or all of a rank at once by its grouped products. Tokens go to them and come back with its all-to-all
dispatcher, or with DeepEP's kernels (flex): both take any number of tokens from each rank, and no token is ever
dropped. Its third dispatcher, allgather, wants equally many from each, which packed samples are not: Megatron refuses
it with variable_seq_lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from gspo_hpc.config import Config
from gspo_hpc.model_config import Architecture
from gspo_hpc.routing import Choices, Routing

if not hasattr(moe_utils, "te_general_gemm"):  # Megatron-Core 0.16.1 asks for it where Transformer Engine is not there
    moe_utils.te_general_gemm = None

_DTYPES = {"float32": "fp32", "float64": "fp64", None: None}


class Router(TopKRouter):
    """Megatron's router, whose choices can be told, recorded and counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices = Choices(self.config.num_moe_experts, torch.cuda.current_device())
        self.router_replay = self.choices

    def _apply_expert_bias(self, *args: Any, **kwargs: Any) -> None:
        """No family here has such a bias. Megatron's own, which does nothing without one, is compiled first."""


def settings(arch: Architecture, config: Config, fused: bool) -> dict[str, Any]:
    """What Megatron's TransformerConfig is told, whether the model has experts or not."""
    # Megatron refuses its default dispatcher, allgather, with samples of any length, experts or not.
    told: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    experts, options = arch.experts, config.moe
    if experts is None:
        return told
    return told | {
        "moe_token_dispatcher_type": options.token_dispatcher,
        "moe_flex_dispatcher_backend": "deepep",  # read with flex only
        "num_moe_experts": experts.count,
        "moe_grouped_gemm": fused,
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
    """The part of a layer that stands in the place of its MLP. `fused`: Transformer Engine's, all experts at once."""
    assert arch.experts is not None
    spec = get_moe_module_spec(use_te=fused, num_experts=arch.experts.count, moe_grouped_gemm=fused)
    # Megatron-Core 0.19 has builders, partial applications of the module's class, in the place of specs.
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    parts.router = Router
    return spec


def routing(chunks: Sequence[torch.nn.Module]) -> Routing:
    """A hold on all routers of this rank's part of the model."""
    config = getattr(chunks[0], "config")  # noqa: B009 (torch types modules' attributes as tensors)
    routers = [
        (chunk, module.layer_number - 1, module.choices)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Router)
    ]
    return Routing(routers, config.num_layers, config.moe_router_topk)
