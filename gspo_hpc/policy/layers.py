"""The layers of a model: plain ones on torch alone, and Transformer Engine's.

Both see packed samples through the *segment table* (see ``gspo_hpc.ops.batch``), which takes the place of an attention
mask, and both compute the same. The plain layers need no extra package and run everywhere. Transformer Engine's fuse a
norm with the matrix product behind it, multiply all experts of a rank at once, and can do so in FP8.

Shapes: T tokens of a micro-batch, L of them on this context-parallel rank, N local heads, K local key/value heads, D
head size, S samples.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops import attention, varlen
from gspo_hpc.ops.attention import gathered_places
from gspo_hpc.ops.varlen import Sequences
from gspo_hpc.policy import moe


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, with statistics in fp32 (arXiv 1910.07467).

    The weight carries Megatron's mark `sequence_parallel`, which makes Megatron sum its gradient over the TP group;
    Megatron's own wrapper of torch's norm refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (an attribute torch lacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., hidden_size] normalized, in the same shape."""
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class RoundedRMSNorm(RMSNorm):
    """An RMS norm that is rounded to its type before the weight multiplies it, as in vLLM and transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., hidden_size] normalized, in the same shape."""
        return cast(torch.Tensor, _RoundedNorm.apply(x, self.weight, self.eps))


class _RoundedNorm(torch.autograd.Function):
    """A norm of two operations that keeps its input alone, as that of one does: the first result is computed again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normalized(x, eps) * weight

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            found = _normalized(x, ctx.eps) * weight
        of_x, of_weight = torch.autograd.grad(found, (x, weight), upstream)
        return of_x, of_weight, None


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), None, eps)


class PackedAttention(MegatronModule):
    """Core attention on packed samples, within the segments of the table.

    It uses torch's variable-length kernel where there is one, else torch's SDPA.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Return the attention's output [L, 1, N * D].

        query is [L, 1, N, D], key and value are [L, 1, K, D], attention_mask holds the segments [S, 5]. Keys and values
        of the other context-parallel ranks are gathered, and their gradients go back to them.
        """
        size = self.config.context_parallel_size
        if size == 1:
            out = self._attend(query[:, 0], key[:, 0], value[:, 0], attention_mask, (0, 1))
            return out.reshape(out.shape[0], 1, -1)
        group = parallel_state.get_context_parallel_group()
        both = torch.cat((key[:, 0], value[:, 0]), dim=1)
        whole = gather_from_sequence_parallel_region(both, group=group)
        whole = whole.index_select(0, gathered_places(attention_mask, size, both.shape[0], both.device))
        keys, values = whole.chunk(2, dim=1)
        share = (parallel_state.get_context_parallel_rank(), size)
        out = self._attend(query[:, 0], keys, values, attention_mask, share)
        out = out + whole[:1].sum() * 0.0  # a rank without queries takes part in the backward pass of the gather
        return out.reshape(out.shape[0], 1, -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, share: tuple[int, int]
    ) -> torch.Tensor:
        """Return the output [L, N, D] of queries [L, N, D] against keys and values [T, K, D], with segments [S, 5]."""
        attend = varlen.attend if varlen.available(q.device, q.dtype) else attention.attend
        return attend(q, k, v, segments, self.scale, share)


class FusedPackedAttention(PackedAttention):
    """The same by Transformer Engine's attention, which picks the best of its kernels."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        from transformer_engine.pytorch import DotProductAttention

        size = config.tensor_model_parallel_size
        self.fused = DotProductAttention(
            config.num_attention_heads // size,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups // size,
            qkv_format="thd",
            attn_mask_type="padding_causal_bottom_right",
            softmax_scale=self.scale,
        )

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, share: tuple[int, int]
    ) -> torch.Tensor:
        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lanes: Sequences, scale: float) -> torch.Tensor:
            out: torch.Tensor = self.fused(
                q,
                k,
                v,
                cu_seqlens_q=lanes.cu_queries,
                cu_seqlens_kv=lanes.cu_keys,
                max_seqlen_q=lanes.max_queries,
                max_seqlen_kv=lanes.max_keys,
            )
            return out.view(q.shape)

        return varlen.attend(q, k, v, segments, self.scale, share, kernel)


def uses_transformer_engine(config: Config) -> bool:
    """Return True if the model is built of Transformer Engine's layers; ValueError where it must be and cannot.

    In float32 it is only if that is asked for: the attention that Transformer Engine has for it keeps all scores. With
    adapters it is not: its layers fuse a norm with the matrix product, whose input an adapter needs. Nor is it on GPUs
    before Ampere, for which it has no attention on packed samples.
    """
    wanted, cuda = config.model.layers, config.cluster.platform == "cuda"
    there = cuda and importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and not there:
        lacks = "it is not installed: pip install transformer-engine[pytorch]" if cuda else "there are no GPUs"
        raise ValueError(f"model.layers: transformer_engine cannot be used, {lacks}; model.layers=torch needs nothing")
    if wanted == "transformer_engine" and config.adapter.type is not None:
        raise ValueError("model.layers: transformer_engine has no adapters: give model.layers=torch")
    if config.model.fp8 and (wanted == "torch" or not there):
        raise ValueError("model.fp8 needs the layers of Transformer Engine: install it, and leave model.layers at auto")
    plain = config.model.dtype == "float32" or config.adapter.type is not None or (there and _is_before_ampere())
    return there and wanted != "torch" and (wanted == "transformer_engine" or not plain)


def _is_before_ampere() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)


def layer_spec(arch: Architecture, has_experts: bool, fused: bool, norm: type[RMSNorm] = RMSNorm) -> ModuleSpec:
    """Return the specification of one layer.

    With `fused` it is built of Transformer Engine's modules, which fuse a norm with the matrix product after it;
    otherwise its norms are of the class `norm`.
    """
    if fused:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
        layer.submodules.self_attention.submodules.core_attention = FusedPackedAttention
        if has_experts:
            layer.submodules.pre_mlp_layernorm = _fused_norm()
            layer.submodules.mlp = moe.layer_spec(arch, fused)
        return layer
    layer = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    within = layer.submodules.self_attention.submodules
    within.core_attention = PackedAttention
    if arch.qk_norm:
        within.q_layernorm = within.k_layernorm = norm
    if has_experts:
        layer.submodules.mlp = moe.layer_spec(arch, fused)
    return layer


def final_norm(fused: bool, norm: type[RMSNorm] = RMSNorm) -> Any:
    """Return the norm behind the last layer."""
    return _fused_norm() if fused else norm


def _fused_norm() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider().layer_norm()
