"""Arguments of vLLM in `rollout.engine`: those that other settings decide, the values of some, and defaults.

Whether an engine has adapters beside its weights decides some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gspo_hpc.config.constants import LORA_RANKS
from gspo_hpc.config.derived import deterministic_kernels, engine_itemsize, trains_adapters
from gspo_hpc.config.schema import Config

# The layers for whose adapters vLLM has places.
_LAYERS_WITH_PLACES = frozenset(
    ("all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
# Arguments of vLLM that follow from an engine's adapters, and the class by which they reach its workers.
_ARGUMENTS_OF_ADAPTERS = ("lora_dtype", "lora_target_modules", "max_lora_rank", "worker_extension_cls")

# Arguments that are not the user's to give, and the settings that they follow from.
OWN_ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "seed": "run.seed",
    "logprobs_mode": "the log-probs that training needs",
    "weight_transfer_config": "the way weights are sent",
}

# Settings of rollout.engine that the estimates know, each a number above 0, with vLLM's own default.
ENGINE_DEFAULTS = {
    "gpu_memory_utilization": 0.92,  # of the card, at most 1
    "max_num_batched_tokens": 8192,  # of one step
    "max_num_seqs": 1024,  # sequences at once
}


def engine_setting(config: Config, name: str) -> float:
    """Return a number of rollout.engine: what is given, or vLLM's default if that is absent, null or impossible."""
    given = config.rollout.engine.get(name)
    return ENGINE_DEFAULTS[name] if given is None or not _possible(name, given) else float(given)


def _possible(name: str, given: Any) -> bool:
    """Return True for a value that an estimate can count with; the plan refuses the others."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return 0 < given <= 1 if name == "gpu_memory_utilization" else 1 <= given < 1e9 and given == int(given)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_share(value: Any) -> bool:
    """Return whether a value is a number above 0 and up to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or null."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0, or null."""
    return is_number(value) and (value is None or value > 0)


def is_not_negative(value: Any) -> bool:
    """Return whether a value is a number from 0, or null."""
    return is_number(value) and (value is None or value >= 0)


def is_number_of_logprobs(value: Any) -> bool:
    """Return whether a value is a number from 0, -1 for all tokens of the vocabulary, or null."""
    return is_not_negative(value) or (is_number(value) and value == -1)


# Arguments whose values are counts or sizes, with the bounds that all supported versions of vLLM have.
_POSITIVE = ("block_size", "max_num_partial_prefills")
_NOT_NEGATIVE = ("kv_cache_memory_bytes", "long_prefill_token_threshold", "cpu_offload_gb", "swap_space")

LATER_OR_EARLIER = frozenset(("max_num_partial_prefills", "swap_space"))  # arguments of some versions of vLLM alone

ONLY_ENGINE_VALUES = {  # arguments that have one value here, which engines have without them
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_sleep_mode": True,
    "skip_tokenizer_init": False,
    "enable_return_routed_experts": True,
}

# The values that each argument may have, and the words for a message.
ENGINE_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gpu_memory_utilization": (is_share, "must be above 0 and at most 1"),
    "max_num_seqs": (is_count, "must be a whole number, 1 or more"),
    "max_num_batched_tokens": (is_count, "must be a whole number, 1 or more"),
    "pipeline_parallel_size": (lambda v: v == 1, "must be 1: an engine is cut by rollout.tensor_parallel_size alone"),
    "data_parallel_size": (lambda v: v == 1, "must be 1: rollout.engines_per_node says how many engines there are"),
    "enable_sleep_mode": (lambda v: v is True, "must be true: engines sleep while the trainer works"),
    "skip_tokenizer_init": (lambda v: v is False, "must be false: reward functions need text"),
    "enable_return_routed_experts": (lambda v: v is True, "must be true or absent: moe.router_replay sets it"),
    "max_logprobs": (is_number_of_logprobs, "must be a number, 0 or more, or -1 for the whole vocabulary"),
    **dict.fromkeys(_POSITIVE, (is_positive, "must be a number above 0")),
    **dict.fromkeys(_NOT_NEGATIVE, (is_not_negative, "must be a number, 0 or more")),
}


# The arguments of vllm.LLM in version 0.32, by which misspelt ones are found. Other versions have others, too.
VLLM_ARGUMENTS = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
    aux_output_config block_size chat_template code_revision collect_detailed_traces compilation_config
    config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address
    data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    dcp_q_replicate decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend
    distributed_timeout_seconds download_dir dp_sync_interval dtype ec_manager_config ec_transfer_config
    elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
    enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_lora enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
    enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_return_routed_experts
    enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager
    engram_config eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config
    fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides
    hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
    kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config
    kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only
    limit_mm_per_prompt linear_backend load_format log_config_file log_level logging_config logits_processors
    logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype lora_target_modules
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
    mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size
    max_logprobs max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs
    max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
    max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
    mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
    model model_class_overrides model_impl model_loader_extra_config model_weights moe_backend nnodes node_rank
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
    override_generation_config per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit profiler_config pt_load_map_location quantization quantization_config ray_workers_use_nsight
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
    return_sampling_mask revision runner safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl scheduling_policy seed
    served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model
    spec_tokens specialize_active_lora speculative_config stream_interval structured_outputs_config
    swa_bounded_replay tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tokens_only
    trust_remote_code ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method
    video_pruning_rate watermark watermark_config weight_transfer_config worker_cls worker_extension_cls
    """.split()
)


def adapters_beside_weights(config: Config, *, experts: bool) -> bool:
    """Return True if engines get adapters beside their weights, as vLLM's own, and not merged into them.

    In 16 bits merging rounds away what is smaller than a weight's last bit. In float32 nothing is rounded, and merged
    weights cost an engine nothing while it generates. With deterministic kernels they are merged, too: what vLLM adds
    for adapters depends on how many tokens are in the batch, up to version 0.29 at least. `experts`: the model is a
    mixture of experts.
    """
    wanted = config.adapter.engine
    if not trains_adapters(config) or wanted == "merged":
        return False
    if wanted == "adapters":
        return True  # a plan says what would be in the way
    if engine_itemsize(config) != 2 or deterministic_kernels(config):
        return False
    return adapters_obstacle(config, experts=experts) is None


def adapters_obstacle(config: Config, *, experts: bool) -> str | None:
    """Return why an engine cannot have adapters beside its weights, as a clause; None where it can."""
    rank, others = config.adapter.rank, sorted(set(config.adapter.targets) - _LAYERS_WITH_PLACES)
    if experts:
        return "vLLM would need adapters of experts"
    if others:
        return f"only some of vLLM's models have places for adapters on {', '.join(others)}"
    if rank > LORA_RANKS[-1]:
        return f"vLLM has room for ranks up to {LORA_RANKS[-1]}, and adapter.rank is {rank}"
    if config.cluster.platform == "cuda" and engine_itemsize(config) == 4:
        return "vLLM's kernels for adapters compute in 16 bits, and engines have float32"
    if config.rollout.mode == "server":
        return "ranks that only generate keep merged weights, to fill an engine that dies"
    if config.rollout.engine.get("enable_lora") is False:
        return "rollout.engine.enable_lora is false"
    if given := [name for name in _ARGUMENTS_OF_ADAPTERS if name in config.rollout.engine]:
        return f"engines with adapters have a value of their own for rollout.engine.{given[0]}, which is given"
    return None
