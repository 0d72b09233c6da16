"""Models of families that this package does not know, by mcore-bridge (github.com/modelscope/mcore-bridge).

Floor 3; the only file that imports mcore_bridge. Written against its release 1.6.5, and not run on a GPU yet: it needs
Transformer Engine. Its attention is told where samples begin and nothing else, so every sample has its own copy of the
prompt, and context-parallel ranks are refused by the planner. Layers that predict several tokens are left out, and
biases of routers stay as they are: neither has a gradient in this training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from gspo_hpc.batch import PackedBatch
from gspo_hpc.config import Config
from gspo_hpc.model import DTYPES, mark_shards, recompute


class PackedChunk:
    """Mixed into a model of mcore-bridge's: what :mod:`gspo_hpc.provider` asks of a chunk."""

    share_embeddings_and_output_weights: bool

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """What the forward pass is called with."""
        return {
            "input_ids": batch.tokens[None, :],
            "position_ids": batch.positions[None, :],
            "attention_mask": None,
            "packed_seq_params": sequences(batch),
        }

    def output_weight(self) -> torch.Tensor:
        """The head's local shard [V_local, H]."""
        chunk: Any = self
        tied = chunk.share_embeddings_and_output_weights
        weight: torch.Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        return weight

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def sequences(batch: PackedBatch) -> PackedSeqParams:
    """Where samples begin, in a micro-batch whose prompts are not shared. Padding behind the last is one more."""
    tokens = int(batch.tokens.numel())
    lengths = (batch.segments[:, 1] + batch.segments[:, 3]).tolist()
    assert batch.segments[:, 4].sum() == 0, "prompts share their opening"
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    assert batch.segments[:, 0].tolist() == starts[:-1], "prompts are shared"
    if starts[-1] < tokens:
        starts.append(tokens)
    longest = max(end - begin for begin, end in zip(starts, starts[1:], strict=False))
    ends = torch.tensor(starts, dtype=torch.int32, device=batch.tokens.device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


class Bridged:
    """A provider (see :mod:`gspo_hpc.provider`)."""

    def __init__(self, config: Config) -> None:
        self._settings = _settings(config)

    def build(self, device: torch.device) -> list[Any]:
        """See Provider."""
        loader = self._settings.model_meta.loader(self._settings)
        loader.model_cls = type("PackedGPTModel", (PackedChunk, loader.model_cls), {})
        size = self._settings.virtual_pipeline_model_parallel_size
        chunks = []
        for number in range(size or 1):
            stage = None if size is None else number
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            chunk = loader.build_model(first, last, vp_stage=stage)
            mark_shards(chunk)
            chunks.append(chunk.to(device))
        return chunks

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """See Provider."""
        self._settings.bridge.load_weights(list(chunks), str(folder))

    def stream(self, chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """See Provider."""
        return self._settings.bridge.export_weights(list(chunks))


def _settings(config: Config) -> Any:
    """mcore-bridge's configuration of the model and of its layout. ValueError where it cannot make it."""
    folder = str(config.model.path)
    try:
        import mcore_bridge
        from mcore_bridge.model import get_mcore_model_type, get_model_meta
    except ImportError as error:
        raise ValueError(
            f"model.provider: mcore_bridge cannot be used ({error}); it needs Transformer Engine: "
            "pip install mcore-bridge transformer-engine[pytorch]"
        ) from None
    from transformers import AutoConfig

    given = AutoConfig.from_pretrained(folder, local_files_only=True)
    told = mcore_bridge.hf_to_mcore_config(given)
    told.pop("mtp_num_layers", None)
    kind = get_mcore_model_type(told["hf_model_type"])
    if kind is None:
        raise ValueError(f"model.path {folder}: mcore-bridge does not know model_type {told['hf_model_type']}")
    meta = get_model_meta(kind)
    if meta.is_multimodal:
        raise ValueError(
            f"model.path {folder}: {told['hf_model_type']} sees or hears, and only text is trained on here"
        )
    parallel, moe, dtype = config.parallel, config.moe, DTYPES[config.model.dtype]
    routers = {"float32": "fp32", "float64": "fp64", None: "none"}
    return meta.config_cls(
        **told
        | recompute(config.memory)
        | ({"fp8": config.model.fp8, "fp8_recipe": config.model.fp8_recipe} if config.model.fp8 else {})
        | {
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "apply_query_key_layer_scaling": False,  # it would ask for it with float16
            "attention_dropout": 0.0,
            "variable_seq_lengths": True,
            "gradient_accumulation_fusion": False,
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
            "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
            "sequence_parallel": parallel.sequence_parallel,
            "moe_token_dispatcher_type": moe.token_dispatcher,
            "moe_router_dtype": routers[moe.router_dtype],
            "moe_aux_loss_coeff": moe.aux_loss_coeff,
            "moe_z_loss_coeff": moe.z_loss_coeff or None,
            "moe_router_bias_update_rate": 0.0,
        }
    )
