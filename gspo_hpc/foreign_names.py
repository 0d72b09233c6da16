"""The names of the arguments that other projects know: by them a run is recognised, and a typo told from what is new.

Floor 6. Names only, of ms-swift 4, verl 0.8 and TRL 1, with those of earlier versions that published examples have.
"""

from __future__ import annotations

_SWIFT = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps adapter_load adapters
    add_non_thinking_prefix add_version advantage_estimator agent_template align_grad_reduce align_param_gather
    aligner_lr apply_dsa_kernel_fusion apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm
    async_generate async_save attention_backend attention_softmax_in_fp32 attn_backend attn_impl batch_p2p_comm
    beta bf16 bias_activation_fusion bias_dropout_fusion bridge_backend cached_dataset cached_val_dataset
    calculate_KL calculate_per_token_loss callbacks center_rewards_coefficient check_model clip_grad columns
    completion_length_limit_scope context_parallel_size cosine_max_len cosine_max_len_value_correct
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_min_len_value_wrong cp_comm_type
    cp_partition_mode create_checkpoint_symlink cross_entropy_fusion_impl cross_entropy_loss_fusion
    csa_dense_mode custom_dataset_info custom_register_path data_parallel_random_init
    data_parallel_sharding_strategy data_seed data_sharding dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset dataset_num_proc dataset_shuffle ddp_backend
    ddp_timeout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers delta desirable_weight
    device_map disable_auto_column_mapping disable_ignore_empty_think dist_ckpt_optim_fully_reshardable
    dist_ckpt_save_pre_mcore_014 distrib_optim_fully_reshardable_mem_efficient download_mode
    dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dynamic_sample enable_channel_loss enable_dft_loss
    enable_npu_model_patch enable_thinking end_weight_decay epsilon epsilon_high eval_interval eval_iters
    eval_steps exp_avg_dtype exp_avg_sq_dtype expert_model_parallel_size expert_tensor_parallel_size
    experts_impl external_plugins f_divergence_type finetune fipo_clip_high_only fipo_clip_range fipo_decay_rate
    fipo_safety_threshold fp16 fp4_format fp4_param_gather fp4_recipe fp8_amax_compute_algo fp8_amax_history_len
    fp8_format fp8_param_gather fp8_recipe freeze_aligner freeze_llm freeze_parameters freeze_parameters_ratio
    freeze_parameters_regex freeze_vit generation_batch_size gkd_logits_topk global_batch_size
    gradient_accumulation_fusion greater_is_better group_by_length gym_env hidden_size hub_token
    ignore_args_error importance_sampling_level init_strategy interleave_prob is_binary_loss_scale kl_in_reward
    label_smoothing language_model_only lazy_tokenize linear_decoupled_in_proj lmbda load load_args
    load_data_args load_from_cache_file load_safetensors local_rank local_repo_path log_completions log_entropy
    log_interval log_rollout_offpolicy_metrics log_throughput logging_steps logprobs lora_alpha lora_bias
    lora_dropout lora_dtype lora_rank loss_scale loss_type lr lr_decay_iters lr_decay_style lr_warmup_fraction
    lr_warmup_init lr_warmup_iters lr_wsd_decay_iters lr_wsd_decay_style main_grads_dtype main_params_dtype
    manual_gc manual_gc_eval manual_gc_steps masked_softmax_fusion max_completion_length max_epochs max_length
    max_memory max_model_len max_new_tokens max_pixels max_resample_times max_shard_size max_turns mcore_adapter
    mcore_model mcore_ref_adapter mcore_ref_model megatron_extra_kwargs merge_lora metric_for_best_model
    mhc_recompute_layer_num micro_batch_size microbatch_group_size_per_vp_stage min_lr mlp_padding_free model
    model_author model_kwargs model_name model_revision model_type modules_to_save moe_aux_loss_coeff
    moe_enable_deepep moe_expert_capacity_factor moe_grouped_gemm moe_layer_recompute
    moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype moe_router_load_balancing_type
    moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_z_loss_coeff
    move_model_batches mrl_dims mtp_decoder_input_detach mtp_loss_scaling_factor mtp_num_layers
    mtp_shared_weights multi_turn_scheduler muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec
    muon_momentum muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode
    muon_use_nesterov nccl_comm_warmup new_special_tokens no_bias_dropout_fusion no_gradient_accumulation_fusion
    no_initialization no_load_optim no_load_rng no_masked_softmax_fusion no_rope_fusion no_save_optim
    no_save_rng norm_bbox num_beams num_generations num_generations_eval num_iterations num_labels num_layers
    num_train_epochs num_workers off_policy_sequence_mask_delta offload_bridge offload_model offload_optimizer
    offload_teacher_model optimizer optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction
    output_dir overlap_grad_reduce overlap_p2p_comm overlap_param_gather
    overlap_param_gather_with_optimizer_step overlong_filter packing packing_length packing_num_proc
    packing_strategy padding_free padding_side perform_initialization pipeline_model_parallel_layout
    pipeline_model_parallel_size preserve_thinking problem_type real_tau recompute_granularity recompute_method
    recompute_modules recompute_num_layers ref_adapter_load ref_adapters ref_load ref_model
    ref_model_mixup_alpha ref_model_sync_steps reference_free remove_unused_columns repetition_max_penalty
    repetition_n_grams repetition_penalty report_to response_prefix reward_funcs reward_model
    reward_model_plugin reward_weights rlhf_type rollout_importance_sampling_mode
    rollout_importance_sampling_threshold rope_scaling router_replay_mode rpo_alpha save save_interval
    save_missing_weights save_safetensors save_steps save_strategy save_total_limit scale_rewards seed seq_kd
    sequence_packing_scheduler sequence_parallel sequence_parallel_size sft_alpha sgd_momentum
    shuffle_buffer_size sleep_level soft_cache_length soft_max_length split_dataset_ratio start_weight_decay
    steps_per_generation stop_words stopping_strategy stream streaming strict structured_outputs_regex
    swanlab_exp_name swanlab_project sync_ref_model system target_modules target_regex task_type tau_neg tau_pos
    te_rng_tracker teacher_kl_coef teacher_model teacher_model_revision teacher_model_server teacher_model_type
    teacher_tag_key temperature template template_backend tensor_model_parallel_size tensorboard_dir
    tensorboard_log_interval tensorboard_queue_size top_entropy_quantile top_k top_logprobs top_p torch_dtype
    tp_comm_overlap train_dataloader_shuffle train_iters train_type trainable_parameters
    trainable_parameters_regex truncation_strategy tuner_backend tuner_type undesirable_weight use_chat_template
    use_cpu_initialization use_distributed_optimizer use_fused_mhc use_gym_env use_hf use_megatron_fsdp
    use_persistent_ckpt_worker use_precision_aware_optimizer use_ray use_rslora use_swift_lora use_vllm
    val_dataset val_dataset_shuffle virtual_pipeline_model_parallel_size vit_attn_impl
    vit_gradient_checkpointing vit_gradient_checkpointing_kwargs vit_lr vllm_disable_cascade_attn
    vllm_enable_lora vllm_enable_prefix_caching vllm_enforce_eager vllm_engine_kwargs
    vllm_gpu_memory_utilization vllm_limit_mm_per_prompt vllm_max_model_len vllm_max_num_seqs
    vllm_mm_processor_cache_gb vllm_mode vllm_server_base_url vllm_server_group_port vllm_server_host
    vllm_server_pass_dataset vllm_server_port vllm_server_timeout vllm_tensor_parallel_size wandb_exp_name
    wandb_log_unique_prompts wandb_project wandb_save_dir weight_decay weight_decay_incr_style
"""
_TRL = """
    accelerator_config adam_beta1 adam_beta2 adam_epsilon attn_implementation auto_find_batch_size
    average_tokens_across_devices batch_eval_metrics benchmarks beta bf16 bf16_full_eval bnb_4bit_quant_storage
    bnb_4bit_quant_type cache_implementation callbacks cast_lm_head_to_fp32 chat_template chat_template_kwargs
    code_eval_scoring_mode code_eval_test_batch_size code_language code_provider config cosine_max_len
    cosine_max_value_correct cosine_max_value_wrong cosine_min_value_correct cosine_min_value_wrong data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_config
    dataset_configs dataset_mixture dataset_name dataset_prompt_column dataset_streaming dataset_test_split
    dataset_train_split datasets ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout disable_tqdm do_eval do_predict do_train
    ds3_gather_for_generation dtype e2b_router_url enable_jit_checkpoint entropy_coef entropy_coef_delta
    entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object evaluation_strategy
    fp16 fp16_backend fp16_full_eval fp16_opt_level fsdp fsdp_config full_determinism generation_batch_size
    generation_kwargs gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better group_by_length half_precision_backend hub_always_push hub_model_id hub_model_revision
    hub_private_repo hub_revision hub_strategy hub_token ignore_bias_buffers ignore_data_skip
    importance_sampling_level include_for_metrics include_num_input_tokens_seen jit_mode_eval label_names
    label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end
    load_in_4bit load_in_8bit local_rank log_completions log_completions_hub_repo log_level log_level_replica
    log_multimodal log_on_each_node log_unique_prompts logging_dir logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
    lora_target_parameters lora_task_type loss_type lr_scheduler_kwargs lr_scheduler_type
    mask_truncated_completions max_completion_len max_completion_length max_grad_norm max_prompt_length
    max_steps max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs model_name_or_path
    model_revision morph_router_url multi_objective_aggregation neftune_noise_alpha no_cuda
    num_completions_to_print num_generations num_generations_eval num_iterations num_train_epochs
    off_policy_mask_threshold optim optim_args optim_target_modules output_dir overwrite_output_dir
    pad_to_multiple_of parallel_code_exec_per_proc parallelism_config past_index per_device_eval_batch_size
    per_device_train_batch_size prediction_loss_only project push_to_hub push_to_hub_model_id ray_scope
    ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_max_penalty repetition_n_grams
    repetition_penalty report_to restore_callback_states_from_checkpoint resume_from_checkpoint reward_funcs
    reward_model_name_or_path reward_weights router_aux_loss_coef run_name sapo_temperature_neg
    sapo_temperature_pos save_on_each_node save_only_model save_steps save_strategy save_total_limit
    scale_rewards seed shuffle_dataset shuffle_generation_inputs skip_memory_metrics soft_punish_cache
    steps_per_generation streaming sync_ref_model system_prompt temperature test_split_size tf32
    top_entropy_quantile top_k top_p torch_compile torch_compile_backend torch_compile_mode torch_dtype
    torch_empty_cache_steps torchdynamo tpu_num_cores trackio_bucket_id trackio_space_id trackio_static_space_id
    train_sampling_strategy transformers_continuous_batching_config trust_remote_code use_adaptive_entropy
    use_bias_correction_kl use_bnb_nested_quant use_cache use_cpu use_dora use_ipex use_liger_kernel
    use_liger_loss use_mps_device use_peft use_rslora use_transformers_continuous_batching
    use_transformers_paged use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_device
    vllm_dtype vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_guided_decoding_regex
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_len vllm_max_model_length
    vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex vllm_tensor_parallel_size wandb_entity wandb_log_unique_prompts wandb_project
    wandb_run_group warmup_ratio warmup_steps weight_decay
"""
_VERL = {
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.actor": (
        "calculate_entropy calculate_sum_pi_squared clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low "
        "data_loader_seed entropy_checkpointing entropy_coeff entropy_from_logits_with_chunking "
        "freeze_vision_tower grad_clip kl_loss_coef kl_loss_type load_weight loss_agg_mode loss_scale_factor "
        "ppo_epochs ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_mini_batch_size rollout_n shuffle strategy sum_pi_squared_checkpointing tau_neg tau_pos "
        "ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_kl_loss use_prefix_grouper "
        "use_remove_padding use_torch_compile"
    ),
    "actor_rollout_ref.actor.checkpoint": "async_save load_contents save_contents",
    "actor_rollout_ref.actor.fsdp_config": (
        "dtype entropy_checkpointing entropy_from_logits_with_chunking forward_only forward_prefetch fsdp_size "
        "full_determinism model_dtype offload_policy optimizer_offload param_offload reshard_after_forward seed "
        "strategy ulysses_sequence_parallel_size use_orig_params use_torch_compile"
    ),
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": "min_num_params",
    "actor_rollout_ref.actor.megatron": (
        "context_parallel_size dist_checkpointing_path dist_checkpointing_prefix dtype expert_model_parallel_size "
        "expert_tensor_parallel_size forward_only grad_offload optimizer_offload param_offload "
        "pipeline_model_parallel_size seed sequence_parallel tensor_model_parallel_size use_dist_checkpointing "
        "use_distributed_optimizer use_mbridge use_remove_padding vanilla_mbridge "
        "virtual_pipeline_model_parallel_size"
    ),
    "actor_rollout_ref.actor.optim": (
        "betas clip_grad lr lr_decay_steps lr_decay_style lr_scheduler_type lr_warmup_init lr_warmup_steps "
        "lr_warmup_steps_ratio lr_wsd_decay_steps lr_wsd_decay_style min_lr min_lr_ratio num_cycles optimizer "
        "optimizer_impl total_training_steps use_checkpoint_opt_param_scheduler warmup_style weight_decay "
        "weight_decay_incr_style"
    ),
    "actor_rollout_ref.actor.policy_loss": "clip_cov_lb clip_cov_ratio clip_cov_ub kl_cov_ratio loss_mode ppo_kl_coef",
    "actor_rollout_ref.actor.router_replay": "mode record_file replay_file",
    "actor_rollout_ref.model": (
        "custom_chat_template enable_activation_offload enable_gradient_checkpointing exclude_modules "
        "external_lib hf_config_path lora_adapter_path lora_alpha lora_rank path target_modules tokenizer_path "
        "trust_remote_code use_fused_kernels use_liger use_remove_padding use_shm"
    ),
    "actor_rollout_ref.model.fused_kernel_options": "impl_backend",
    "actor_rollout_ref.model.lora": (
        "a2a_experimental adapter_path alpha dropout dropout_position dtype exclude_modules freeze_language_model "
        "freeze_vision_model freeze_vision_projection lora_A_init_method lora_B_init_method merge rank "
        "target_modules type"
    ),
    "actor_rollout_ref.model.mtp": (
        "detach_encoder enable enable_rollout enable_train method mtp_loss_scaling_factor num_speculative_tokens "
        "speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps"
    ),
    "actor_rollout_ref.model.tiled_mlp": "enabled num_shards",
    "actor_rollout_ref.ref": (
        "entropy_checkpointing entropy_from_logits_with_chunking load_weight log_prob_max_token_len_per_gpu "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz rollout_n strategy "
        "ulysses_sequence_parallel_size use_torch_compile"
    ),
    "actor_rollout_ref.ref.fsdp_config": (
        "dtype entropy_checkpointing entropy_from_logits_with_chunking forward_only forward_prefetch fsdp_size "
        "full_determinism model_dtype offload_policy optimizer_offload param_offload reshard_after_forward seed "
        "strategy ulysses_sequence_parallel_size use_orig_params use_torch_compile"
    ),
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": "min_num_params",
    "actor_rollout_ref.ref.router_replay": "mode record_file replay_file",
    "actor_rollout_ref.rollout": (
        "calculate_log_probs cudagraph_capture_sizes data_parallel_size disable_log_stats do_sample dtype "
        "enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay enforce_eager "
        "expert_parallel_size free_cache_engine gpu_memory_utilization ignore_eos layered_summon limit_images "
        "load_format log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz logprobs_mode max_model_len max_num_batched_tokens max_num_seqs mode mtp "
        "multi_stage_wake_up n name over_sample_rate pipeline_model_parallel_size prompt_length quantization "
        "quantization_config_file response_length scheduling_policy skip_dump_dir skip_rollout "
        "skip_tokenizer_init temperature tensor_model_parallel_size top_k top_p"
    ),
    "actor_rollout_ref.rollout.agent": "agent_loop_config_path default_agent_loop num_workers",
    "actor_rollout_ref.rollout.agent.custom_async_server": "name path",
    "actor_rollout_ref.rollout.checkpoint_engine": "backend engine_kwargs update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.engine_kwargs": "sglang trtllm vllm",
    "actor_rollout_ref.rollout.layer_name_map": "gate_proj_layer_name qkv_layer_name",
    "actor_rollout_ref.rollout.multi_turn": (
        "enable format interaction_config_path max_assistant_turns max_parallel_calls max_tool_response_length "
        "max_user_turns num_repeat_rollouts tokenization_sanity_check_mode tool_config_path "
        "tool_response_truncate_side use_inference_chat_template"
    ),
    "actor_rollout_ref.rollout.prometheus": "enable file port served_model_name",
    "actor_rollout_ref.rollout.trace": "backend max_samples_per_step_per_worker token2text",
    "actor_rollout_ref.rollout.val_kwargs": "do_sample n temperature top_k top_p",
    "algorithm": "adv_estimator gamma kl_penalty lam norm_adv_by_std_in_grpo use_kl_in_reward use_pf_ppo",
    "algorithm.filter_groups": "enable max_num_gen_batches metric",
    "algorithm.kl_ctrl": "horizon kl_coef target_kl type",
    "algorithm.pf_ppo": "reweight_method weight_pow",
    "algorithm.rollout_correction": (
        "bypass_mode loss_type rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs "
        "rollout_rs_threshold"
    ),
    "custom_reward_function": "name path",
    "data": (
        "apply_chat_template_kwargs dataloader_num_workers filter_overlong_prompts "
        "filter_overlong_prompts_workers gen_batch_size image_key image_patch_size max_prompt_length "
        "max_response_length prompt_key return_full_prompt return_multi_modal_inputs return_raw_chat "
        "return_raw_input_ids reward_fn_key seed shuffle tokenizer tool_config_path train_batch_size train_files "
        "train_max_samples truncation trust_remote_code use_shm val_batch_size val_files val_max_samples "
        "validation_shuffle video_key"
    ),
    "data.custom_cls": "name path",
    "data.datagen": "name path",
    "data.sampler": "class_name class_path",
    "trainer": (
        "balance_batch critic_warmup default_hdfs_dir default_local_dir del_local_ckpt_after_load device "
        "esi_redundant_time experiment_name hybrid_engine log_val_generations logger max_actor_ckpt_to_keep "
        "max_critic_ckpt_to_keep n_gpus_per_node nnodes project_name ray_wait_register_center_timeout "
        "resume_from_path resume_mode rollout_data_dir save_freq test_freq total_epochs total_training_steps "
        "use_legacy_worker_impl val_before_train val_only validation_data_dir"
    ),
}

SWIFT = frozenset(_SWIFT.split())
TRL = frozenset(_TRL.split())
VERL = frozenset(f"{section}.{name}" for section, names in _VERL.items() for name in names.split())
