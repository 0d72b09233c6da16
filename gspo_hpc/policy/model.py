"""A Megatron-Core GPTModel of a Hugging Face architecture, which returns the hidden states of packed tokens.

Three things differ from a stock GPTModel, so that samples are packed without padding and the head runs on response
tokens only:

- attention sees a *segment table* (``gspo_hpc.ops.batch``) through Megatron's ``attention_mask`` argument, because
  that is what Megatron hands unchanged to every layer, also under recomputation;
- rotary embeddings are computed for explicit positions, not for 0..T-1;
- the output is the last hidden state, from which ``gspo_hpc.ops.logprobs`` computes log-probs in chunks.

Shapes: T tokens of a micro-batch, H hidden size, D head size, V_local rows of the head on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gspo_hpc.config.derived import deterministic_kernels, fuses_swiglu
from gspo_hpc.config.schema import Config, Memory
from gspo_hpc.models.architecture import Architecture, Rope
from gspo_hpc.ops import varlen
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.ops.constants import Constants
from gspo_hpc.ops.rope import inverse_frequencies
from gspo_hpc.ops.weight_map import padded_vocab_size
from gspo_hpc.policy import compat, moe
from gspo_hpc.policy.adapters import lora
from gspo_hpc.policy.layers import RMSNorm, RoundedRMSNorm, final_norm, layer_spec, uses_transformer_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PositionedRotary(torch.nn.Module):
    """Rotary angles [T, 1, 1, D] of the positions that are set before each forward pass."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.inverse = inverse_frequencies(rope, head_dim).to(device)
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of positions, which Megatron asks for before it calls the module."""
        assert self.positions is not None
        return int(self.positions.numel())

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the angles [T, 1, 1, D] in fp32, in which Hugging Face computes them whatever the model's dtype is."""
        assert self.positions is not None, "set positions before the forward pass"
        angles = self.positions.float()[:, None] * self.inverse[None, :]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedGPTModel(compat.HiddenStates, GPTModel):
    """A GPTModel whose last stage returns hidden states [T, 1, H] after the final norm."""

    fused = False  # True: of Transformer Engine's layers, whose parameters have other names

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the forward pass, and set its positions."""
        self.rotary_pos_emb.positions = batch.positions
        return {
            "input_ids": batch.tokens[None, :],
            "position_ids": batch.positions[None, :],
            "attention_mask": batch.segments,
        }

    def output_weight(self) -> torch.Tensor:
        """Return the head's local shard [V_local, H], which is the embedding's where the model ties them."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def transformer_config(arch: Architecture, config: Config) -> TransformerConfig:
    """Return Megatron's configuration of the model and of its parallel layout."""
    parallel = config.parallel
    dtype = DTYPES[config.model.dtype]
    cpu, fused = config.cluster.platform == "cpu", uses_transformer_engine(config)
    return TransformerConfig(
        **moe.settings(arch, config, fused),
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        attention_softmax_in_fp32=True,
        attention_backend=AttnBackend[config.model.attention_backend],  # by variables that Transformer Engine reads
        softmax_scale=arch.head_dim**-0.5 * arch.rope.magnitude**2,  # once for queries, once for keys
        variable_seq_lengths=True,  # a micro-batch has as many tokens as its samples have
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        # With two stages, each is before and behind the other: batched exchanges would mix up the two directions.
        overlap_p2p_comm=parallel.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=parallel.virtual_pipeline_model_parallel_size is None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **recompute(config.memory),
        **({"fp8": config.model.fp8, "fp8_recipe": config.model.fp8_recipe} if config.model.fp8 else {}),
        deterministic_mode=deterministic_kernels(config),
        use_cpu_initialization=cpu,
        perform_initialization=False,  # every weight is loaded
        gradient_accumulation_fusion=False,  # see compat.accumulate_in_buffers
        bias_activation_fusion=fuses_swiglu(config),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,  # Transformer Engine's kernel, which takes an angle for each token
        persist_layer_norm=False,
    )


def constants(chunk: PackedGPTModel, arch: Architecture) -> Constants:
    """Return the numbers beside its weights by which a chunk computes; all chunks have the same."""
    return Constants(
        rope=arch.rope,
        max_position_embeddings=arch.max_position_embeddings,
        inverse_frequencies=tuple(chunk.rotary_pos_emb.inverse.tolist()),
        head_dim=arch.head_dim,
        attention_scale=float(chunk.config.softmax_scale),
        norm_eps=float(chunk.config.layernorm_epsilon),
    )


def recompute(memory: Memory) -> dict[str, Any]:
    """Return the arguments of Megatron's TransformerConfig that concern recomputation."""
    if memory.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(memory.recompute_modules)}
    if memory.recompute_granularity == "full":
        method, layers = memory.recompute_method, memory.recompute_num_layers
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    return {}


def _spec(
    config: TransformerConfig, arch: Architecture, number: int | None, fused: bool, norm: type[RMSNorm]
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, number)
    layers = range(first, first + get_num_layers_to_build(config, number))
    specs = [layer_spec(arch, arch.has_experts(layer), fused, norm) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=final_norm(fused, norm))


def mark_shards(model: torch.nn.Module) -> None:
    """Mark the weights that are split over tensor-parallel ranks.

    Megatron marks them only where it initializes them too. Without the mark, the gradient norm counts the first rank's
    shard only, and clipping is silently wrong.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, True, dim, 1)


def mark_experts(model: torch.nn.Module) -> None:
    """Mark the weights of experts that other ranks share than share the rest of the model.

    Megatron marks them only with expert parallelism. Without the mark, experts whose tensor parallelism is not that of
    the rest have their gradients summed over the replicas of the rest alone, and not over all ranks that hold them.
    """
    if parallel_state.get_expert_tensor_parallel_world_size() == parallel_state.get_tensor_model_parallel_world_size():
        return
    for name, weight in model.named_parameters():
        if ".experts." in name:
            setattr(weight, "allreduce", False)  # noqa: B010 (an attribute torch lacks)


def build(arch: Architecture, config: Config, device: torch.device) -> list[PackedGPTModel]:
    """Return this rank's chunks of the model, without weights; ``gspo_hpc.policy.weight_stream`` loads them.

    There is one chunk, or several with a virtual pipeline, which goes through the first chunk of all stages, then
    through the second.
    """
    settings = transformer_config(arch, config)
    size = settings.virtual_pipeline_model_parallel_size
    fused = uses_transformer_engine(config)
    if device.type == "cuda" and not fused:
        varlen.use_newest_kernel(device)
    chunks = [_chunk(arch, config, settings, None if size is None else n, device, fused) for n in range(size or 1)]
    if fused:
        compat.accumulate_in_buffers(chunks)
    return chunks


def _chunk(
    arch: Architecture,
    config: Config,
    settings: TransformerConfig,
    number: int | None,
    device: torch.device,
    fused: bool,
) -> PackedGPTModel:
    norm = RMSNorm if config.model.norms_in_fp32 else RoundedRMSNorm
    model = PackedGPTModel(
        config=settings,
        transformer_layer_spec=_spec(settings, arch, number, fused, norm),
        vocab_size=padded_vocab_size(arch, settings.tensor_model_parallel_size),
        max_sequence_length=arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=number,
    )
    compat.set_rotary(model, PositionedRotary(arch.rope, arch.head_dim, device))
    model.fused = fused
    mark_shards(model)
    if config.adapter.type is not None:
        lora.attach(model, config.adapter, arch)
    mark_experts(model)  # adapters, too
    return model.to(device)
