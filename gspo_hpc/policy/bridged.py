"""Models of families that this package does not know, made by mcore-bridge (github.com/modelscope/mcore-bridge).

This is the only file that imports mcore_bridge. It is written against release 1.6.5 and has not been run on a GPU yet:
mcore-bridge needs Transformer Engine. Its attention takes the beginnings of samples and nothing else, so every sample
has its own copy of the prompt, and the planner refuses context parallelism. Layers that predict several tokens are left
out, and biases of routers stay as they are: neither has a gradient in this training.

Shapes: V_local rows of the head on this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend

from gspo_hpc.config.derived import fuses_swiglu
from gspo_hpc.config.schema import Config
from gspo_hpc.models import weight_files
from gspo_hpc.ops import hf_folder
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.ops.weight_parts import Memory, Part, stream_of
from gspo_hpc.policy import compat
from gspo_hpc.policy.model import DTYPES, mark_experts, mark_shards, recompute
from gspo_hpc.system.progress import limited

_START_SECONDS = 1800.0  # for a load, and the time of its bytes at the slowest rate that is no hang
_SLOWEST_READ = 50e6  # bytes per second, of all ranks of a node together


class PackedChunk(compat.HiddenStates):
    """A mixin that gives mcore-bridge's models the methods that :mod:`gspo_hpc.policy.provider` asks of a chunk."""

    share_embeddings_and_output_weights: bool

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the forward pass."""
        return {
            "input_ids": batch.tokens[None, :],
            "position_ids": batch.positions[None, :],
            "attention_mask": None,
            "packed_seq_params": sequences(batch),
        }

    def output_weight(self) -> torch.Tensor:
        """Return the head's local shard [V_local, H]."""
        chunk: Any = self
        tied = chunk.share_embeddings_and_output_weights
        weight: torch.Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        return weight


def sequences(batch: PackedBatch) -> PackedSeqParams:
    """Return where samples begin in a micro-batch that shares no prompts; padding at its end counts as one more."""
    tokens = int(batch.tokens.numel())
    lengths = (batch.segments[:, 1] + batch.segments[:, 3]).tolist()
    assert batch.segments[:, 4].sum() == 0, "prompts share a prefix"
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
    """The provider of mcore-bridge's models (see :mod:`gspo_hpc.policy.provider`)."""

    def __init__(self, config: Config) -> None:
        self._settings = _settings(config)
        self._folder, self._itemsize = Path(str(config.model.path)), DTYPES[config.model.dtype].itemsize
        self._largest: int | None = None  # bytes of a tensor, once they are needed

    def build(self, device: torch.device) -> list[Any]:
        """Build this rank's chunks, without weights (see Provider)."""
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
            mark_experts(chunk)
            chunks.append(chunk.to(device))
        return chunks

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """Fill the chunks from a Hugging Face folder (see Provider)."""
        # The library tells nobody how far it has come.
        with limited(_START_SECONDS + weight_files.size(Path(folder)) / _SLOWEST_READ):
            self._settings.bridge.load_weights(list(chunks), str(folder))

    def stream(self, chunks: Sequence[Any], memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Yield every Hugging Face tensor, full and in a fixed order (see Provider)."""
        tensors: Iterator[tuple[str, torch.Tensor]] = self._settings.bridge.export_weights(list(chunks))
        if memory is not None:
            if self._largest is None:
                self._largest = weight_files.most_elements(self._folder) * self._itemsize
            yield from stream_of(tensors, self._largest)(memory)
        else:
            yield from ([Part(name, tuple(tensor.shape), tensor)] for name, tensor in tensors)

    def expert_sums(self, chunks: Sequence[Any], dtype: torch.dtype) -> None:
        """Return None: where the library keeps which expert is its own affair (see Provider)."""

    def constants(self, chunks: Sequence[Any]) -> None:
        """Return None: where the library keeps them depends on the family (see Provider)."""


def _settings(config: Config) -> Any:
    """Return mcore-bridge's configuration of the model and of its layout; ValueError where it cannot make one."""
    folder = str(config.model.path)
    try:
        import mcore_bridge
        from mcore_bridge.model import get_mcore_model_type, get_model_meta
    except ImportError as error:
        raise ValueError(
            f"model.provider: mcore_bridge cannot be used ({error}); it needs Transformer Engine: "
            "pip install mcore-bridge transformer-engine[pytorch]"
        ) from None
    known = mcore_bridge.hf_to_mcore_config(hf_folder.configuration(folder))
    known.pop("mtp_num_layers", None)
    kind = get_mcore_model_type(known["hf_model_type"])
    if kind is None:
        raise ValueError(f"model.path {folder}: mcore-bridge does not know model_type {known['hf_model_type']}")
    meta = get_model_meta(kind)
    if meta.is_multimodal:
        raise ValueError(
            f"model.path {folder}: {known['hf_model_type']} is a multimodal model; only text models can be trained"
        )
    parallel, moe, dtype = config.parallel, config.moe, DTYPES[config.model.dtype]
    routers = {"float32": "fp32", "float64": "fp64", None: "none"}
    return meta.config_cls(
        **known
        | recompute(config.memory)
        | ({"fp8": config.model.fp8, "fp8_recipe": config.model.fp8_recipe} if config.model.fp8 else {})
        | {
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "apply_query_key_layer_scaling": False,  # mcore-bridge would set it with float16
            "attention_dropout": 0.0,
            "attention_backend": AttnBackend[config.model.attention_backend],
            "variable_seq_lengths": True,
            "gradient_accumulation_fusion": False,  # a model of another package may use a weight outside of its layer
            "bias_activation_fusion": fuses_swiglu(config),
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
            "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
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
