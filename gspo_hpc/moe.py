"""Mixtures of experts: what Megatron-Core is told of them, and how many tokens each expert was given.

Floor 3. Experts are Megatron's, one after the other (SequentialMLP): that is what runs on the CPU and without
Transformer Engine. Tokens go to them and come back with its all-to-all dispatcher, which takes any number of tokens
from each rank. The router counts what it does, for the metrics; no token is ever dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from gspo_hpc.config import Config
from gspo_hpc.model_config import Architecture

if not hasattr(moe_utils, "te_general_gemm"):  # Megatron-Core 0.16.1 asks for it where Transformer Engine is not there
    moe_utils.te_general_gemm = None

_DTYPES = {"float32": "fp32", "float64": "fp64", None: None}


class CountingRouter(TopKRouter):
    """Megatron's router; `tokens` [experts] counts the tokens that each expert was given while training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [tokens, 1, experts] -> weights and choices, both [tokens, experts]."""
        probs, chosen = super().routing(logits, *args, **kwargs)
        if self.training and torch.is_grad_enabled():  # once, where the layer is computed again for its gradient
            self.tokens += chosen.sum(0)
        return probs, chosen

    def _apply_expert_bias(self, *args: Any, **kwargs: Any) -> None:
        """No family here has such a bias. Megatron's own, which does nothing without one, is compiled first."""


def settings(arch: Architecture, config: Config) -> dict[str, Any]:
    """What Megatron's TransformerConfig is told, whether the model has experts or not."""
    # Megatron refuses its default dispatcher with samples of any length, experts or not.
    told: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    experts, options = arch.experts, config.moe
    if experts is None:
        return told
    return told | {
        "num_moe_experts": experts.count,
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


def layer_spec(arch: Architecture) -> ModuleSpec:
    """The part of a layer that stands in the place of its MLP."""
    assert arch.experts is not None
    spec = get_moe_module_spec(use_te=False, num_experts=arch.experts.count)
    spec.submodules.router = CountingRouter
    return spec


def balance(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    """How tokens were spread over experts since the last call, over all ranks and layers; nothing without experts.

    Tokens per expert (of one layer): mean, least, most. Imbalance: the most of a layer over its mean, on average over
    layers and of the worst one. Idle: experts that no token went to. Collective.
    """
    routers = _routers(chunks)
    config = getattr(chunks[0], "config")  # noqa: B009 (torch types modules' attributes as tensors)
    if config.num_moe_experts is None:
        return {}
    device = torch.cuda.current_device()
    counts = torch.zeros(len(routers), config.num_moe_experts, dtype=torch.int64, device=device)
    for row, router in zip(counts, routers, strict=True):
        row.copy_(router.tokens)
        router.tokens.zero_()
    dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    of_stages = torch.zeros(config.num_layers, config.num_moe_experts, dtype=torch.int64, device=device)
    for row, router in zip(counts, routers, strict=True):
        of_stages[router.layer_number - 1] = row
    dist.all_reduce(of_stages, group=parallel_state.get_pipeline_model_parallel_group())
    tokens = of_stages[of_stages.sum(1) > 0].double()
    if not len(tokens):
        return {}
    imbalance = tokens.amax(1) / tokens.mean(1)
    return {
        "experts/tokens_mean": float(tokens.mean()),
        "experts/tokens_min": float(tokens.min()),
        "experts/tokens_max": float(tokens.max()),
        "experts/imbalance": float(imbalance.mean()),
        "experts/imbalance_max": float(imbalance.max()),
        "experts/idle": float((tokens == 0).sum()),
    }


def forget(chunks: Sequence[torch.nn.Module]) -> None:
    """Count from zero: what was counted so far belongs to a step that was left."""
    for router in _routers(chunks):
        router.tokens.zero_()


def _routers(chunks: Sequence[torch.nn.Module]) -> list[CountingRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, CountingRouter)]
