"""Names that other projects have for settings, and the settings to write here instead."""

from __future__ import annotations

from collections.abc import Mapping

_ESTIMATOR = "algorithm.name, or algorithm.advantage"
_CORRECTION, _TOKENS = "algorithm.correction", "batch.micro_batch_tokens"
_LOGPROB_TOKENS = "batch.logprob_micro_batch_tokens"
_KL = "algorithm.kl_beta above 0"
_KL_LOSS = f"{_KL}, which puts the term into the loss (algorithm.kl_placement: loss)"
_LORA = "adapter.type: lora"
_ROLLOUT = "batch.generation_batch_size, which counts completions, not prompts"
_OF_ENGINES = (
    *("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "max_num_seqs"),
    *("max_num_batched_tokens", "enable_expert_parallel"),
)
_CLIP = "algorithm.clip_low and algorithm.clip_high"
_EPOCHS = "run.max_epochs"
_DUAL = "algorithm.dual_clip, the bound of ratios with a negative advantage"

# TRL, ms-swift, verl, OpenRLHF, NeMo-RL and peft, in lower case. Sizes that count prompts there say that they count
# completions here. A name with dots is the end of one that means something else without what is before it.
PEER_NAMES = {
    # the objective
    "epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "clip_eps": _CLIP,
    "cliprange": _CLIP,
    "eps_clip": _CLIP,
    "eps_clip_low_high": _CLIP,
    **dict.fromkeys(("epsilon_low", "clip_ratio_low", "eps_clip_low", "ratio_clip_min"), "algorithm.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high", "ratio_clip_max"), "algorithm.clip_high"),
    **dict.fromkeys(
        ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl.init_coef", "reference_policy_kl_penalty"),
        "algorithm.kl_beta",
    ),
    **dict.fromkeys(
        ("use_kl_loss", "kl.use_loss"), f"{_KL}, which puts the term into the loss (algorithm.kl_placement: loss)"
    ),
    **dict.fromkeys(("use_kl_in_reward", "kl_in_reward"), f"{_KL} and algorithm.kl_placement: reward"),
    **dict.fromkeys(
        ("kl_loss_type", "kl_penalty", "kl.estimator", "reference_policy_kl_type"), "algorithm.kl_estimator"
    ),
    **dict.fromkeys(("target_kl", "kl.target", "kl_ctrl.type"), "algorithm.kl_target, which the weight then follows"),
    "delta": _DUAL,
    **dict.fromkeys(("clip_ratio_c", "ratio_clip_c"), _DUAL),
    "use_on_policy_kl_approximation": (
        f"algorithm.kl_estimator: unbiased, which has the ratio of the token as a factor, with {_KL}"
    ),
    **dict.fromkeys(("entropy_coeff", "entropy_loss_coef"), "algorithm.entropy_coef"),
    "use_adaptive_entropy": "algorithm.entropy_target, which turns it on above 0",
    "sequence_level_importance_ratios": "algorithm.name: gspo for true, and grpo for false",
    "importance_sampling_level": (
        "algorithm.name: gspo for sequence, gspo_token for sequence_token, and grpo for token"
    ),
    **dict.fromkeys(("loss_mode", "policy_loss_type", "rlhf_type"), "algorithm.name"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "advantage.estimator"), _ESTIMATOR),
    "loss_type": "algorithm.aggregation",
    "loss_agg_mode": "algorithm.aggregation",
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), "algorithm.normalize_advantage"),
    **dict.fromkeys(("no_advantage_std_norm", "advantage.no_std_norm"), "algorithm.normalize_advantage: false"),
    "multi_objective_aggregation": "algorithm.advantage: gdpo for normalize_then_sum",
    **dict.fromkeys(("tau_pos", "sapo_temperature_pos"), "algorithm.gate_positive"),
    **dict.fromkeys(("tau_neg", "sapo_temperature_neg"), "algorithm.gate_negative"),
    **dict.fromkeys(("off_policy_mask_threshold", "off_policy_sequence_mask_delta"), "algorithm.sequence_mask"),
    **dict.fromkeys(("ref_model_sync_steps", "sync_ref_model"), "algorithm.reference_interval"),
    **dict.fromkeys(
        ("teacher_model", "teacher_model_name_or_path", "teacher_model.model_path"),
        "algorithm.teacher, with algorithm.kl_beta above 0",
    ),
    "ref_model_mixup_alpha": "algorithm.reference_mixup",
    **dict.fromkeys(
        (
            *("vllm_importance_sampling_correction", "enable_vllm_is_correction", "is_correction_enable"),
            "use_importance_sampling_correction",
        ),
        f"{_CORRECTION}: truncated",
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_mode", "rollout_importance_sampling_mode", "vllm_is_correction_type"), _CORRECTION
    ),
    **dict.fromkeys(("is_correction_type", "rollout_is", "rollout_rs"), _CORRECTION),
    "bypass_mode": f"{_CORRECTION}: bypass",
    **dict.fromkeys(
        (
            *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "vllm_is_truncated_threshold"),
            *("rollout_importance_sampling_threshold", "tis_imp_ratio_cap", "rollout_is_threshold"),
            *("is_correction_threshold", "rollout_rs_threshold"),
        ),
        f"algorithm.correction_high, with {_CORRECTION}",
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_min", "rollout_rs_threshold_lower"),
        f"algorithm.correction_low, with {_CORRECTION}",
    ),
    # sizes
    "per_device_train_batch_size": "batch.micro_batch_size",
    "ppo_micro_batch_size": "batch.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "micro_train_batch_size": "batch.micro_batch_size",
    **dict.fromkeys(
        (
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size",
            "micro_rollout_batch_size",
            "rollout.micro_batch_size",
        ),
        "batch.logprob_micro_batch_size",
    ),
    **dict.fromkeys(
        ("ref.log_prob_micro_batch_size_per_gpu", "ref.log_prob_micro_batch_size"), "batch.reference_micro_batch_size"
    ),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "train_max_tokens_per_gpu"), "batch.micro_batch_tokens"),
    "train.max_tokens_per_gpu": "batch.micro_batch_tokens",
    **dict.fromkeys(("use_dynamic_bsz", "use_dynamic_batch", "dynamic_batch_enable"), f"{_TOKENS}, the budget itself"),
    **dict.fromkeys(
        ("log_prob_max_token_len_per_gpu", "rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu"), _LOGPROB_TOKENS
    ),
    "log_prob_use_dynamic_bsz": f"{_LOGPROB_TOKENS}, the budget itself",
    "ref.log_prob_max_token_len_per_gpu": "batch.reference_micro_batch_tokens",
    "mini_batch_size": "batch.global_batch_size, which counts completions, not prompts",
    "ppo_mini_batch_size": "batch.global_batch_size, which counts completions, not prompts",
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "gen_batch_size"), _ROLLOUT),
    "num_prompts_per_step": "batch.generation_batch_size, which counts completions: prompts x batch.num_generations",
    "rollout.batch_size": _ROLLOUT,
    "train.batch_size": "batch.global_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size, from which it follows",
    **dict.fromkeys(
        ("n", "group_size", "num_return_sequences", "n_samples_per_prompt", "num_generations_per_prompt"),
        "batch.num_generations",
    ),
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs"), "batch.num_iterations"),
    # generation
    **dict.fromkeys(
        (
            *("max_completion_length", "max_response_len", "max_new_tokens", "max_completion_len", "response_length"),
            "generate_max_len",
        ),
        "rollout.max_response_length",
    ),
    **dict.fromkeys(("prompt_length", "prompt_max_len", "max_prompt_len"), "rollout.max_prompt_length"),
    **dict.fromkeys(
        ("max_length", "max_len", "max_model_len", "vllm_max_model_len", "vllm_max_model_length"),
        "rollout.max_prompt_length and rollout.max_response_length",
    ),
    **dict.fromkeys(("filter_overlong_prompts", "truncation", "truncation_strategy"), "data.overlong"),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), "rollout.truncated: mask"),
    **dict.fromkeys(
        ("dynamic_sample", "filter_groups", "filter_groups.enable", "dynamic_filtering", "dynamic_filtering_enable"),
        "rollout.dynamic_sampling",
    ),
    "filter_groups.metric": "rollout.dynamic_sampling_metric",
    "easy_threshold": "data.no_resampling_pass_rate, a share of right completions",  # prime-rl's, a mean reward
    "max_resample_times": "rollout.max_num_gen_batches, which counts the first batch as well",
    **{name: f"rollout.engine.{name}" for name in _OF_ENGINES},
    **{f"vllm_{name}": f"rollout.engine.{name}" for name in _OF_ENGINES},
    "vllm_disable_cascade_attn": "rollout.engine.disable_cascade_attn",
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size", "rollout_tensor_parallel_size"),
        "rollout.tensor_parallel_size",
    ),
    "vllm.tensor_parallel_size": "rollout.tensor_parallel_size",
    **dict.fromkeys(
        ("vllm_num_engines", "num_engines", "num_infer_workers"),
        "rollout.engines_per_node, which counts those of a node",
    ),
    **dict.fromkeys(
        ("vllm_mode", "colocate_all", "colocate_all_models", "trainer_mode"), "rollout.mode: colocate or server"
    ),
    **dict.fromkeys(
        ("async_generate", "async_train", "async_enable"),
        "rollout.max_staleness above 0, with rollout.mode: server",
    ),
    **dict.fromkeys(
        ("partial_rollout", "partial_rollout_enable"),
        "rollout.unfinished: continue, with rollout.oversampling_factor above 1",
    ),
    **dict.fromkeys(
        ("in_flight_weight_updates", "inflight_weight_updates"),
        "rollout.in_flight_updates, with rollout.mode: server and rollout.max_staleness: 1",
    ),
    **dict.fromkeys(
        ("vllm_enable_sleep_mode", "vllm_enable_sleep", "vllm.enable_sleep", "free_cache_engine"), "rollout.sleep_level"
    ),
    # the optimizer
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "actor.learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "warmup_style"), "optimizer.lr_decay_style"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_iters"), "optimizer.lr_warmup_steps"),
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"),
        "optimizer.lr_warmup_steps, which counts steps: write the ratio times run.max_steps",
    ),
    "min_lr_ratio": "optimizer.min_lr, a rate: write the ratio times optimizer.lr",
    **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), "optimizer.clip_grad"),
    **dict.fromkeys(("betas", "adam_betas"), "optimizer.adam_beta1 and optimizer.adam_beta2"),
    "adam_epsilon": "optimizer.adam_eps",
    "l2": "optimizer.weight_decay",
    **dict.fromkeys(
        ("zero_stage", "deepspeed", "fsdp"),
        "optimizer.distributed, which divides the optimizer's state as ZeRO 1 does, beside the sizes of parallel",
    ),
    "use_distributed_optimizer": "optimizer.distributed",
    "accumulate_allreduce_grads_in_fp32": "optimizer.grad_reduce_in_fp32",
    # layout and memory
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
    "sp": "parallel.sequence_parallel",
    **dict.fromkeys(
        ("dp", "dp_size", "data_parallel_size"),
        "cluster.nodes and cluster.gpus_per_node, from which it follows: GPUs / (TP x PP x CP)",
    ),
    **dict.fromkeys(
        ("ulysses_sequence_parallel_size", "sequence_parallel_size", "ring_attn_size", "ulysses_parallel_size"),
        "parallel.context_parallel_size",
    ),
    **dict.fromkeys(("ds_tensor_parallel_size", "ds.tensor_parallel_size"), "parallel.tensor_model_parallel_size"),
    "expert_parallel_size": "parallel.expert_model_parallel_size",
    "decoder_first_pipeline_num_layers": "parallel.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "parallel.num_layers_in_last_pipeline_stage",
    **dict.fromkeys(("nnodes", "num_nodes", "actor_num_nodes", "num_machines"), "cluster.nodes"),
    "rollout.nnodes": "cluster.generation_nodes",
    **dict.fromkeys(
        ("n_gpus_per_node", "nproc_per_node", "num_gpus_per_node", "actor_num_gpus_per_node"), "cluster.gpus_per_node"
    ),
    "num_processes": "cluster.nodes and cluster.gpus_per_node",
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "enable_gradient_checkpointing", "gradient_checkpointing_enable"),
            "activation_checkpointing",
        ),
        "memory.recompute_granularity: full",
    ),
    "moe_layer_recompute": "memory.recompute_modules: [moe]",
    **dict.fromkeys(("param_offload", "offload_model", "grad_offload"), "memory.offload_trainer"),
    **dict.fromkeys(
        ("optimizer_offload", "adam_offload", "optimizer_cpu_offload", "cpu_offload"), "memory.offload_optimizer"
    ),
    # the model and its adapters
    **dict.fromkeys(("attn_impl", "attn_implementation", "attn_backend"), "model.attention_backend"),
    **dict.fromkeys(("fp32_norm", "norm_dtype", "layernorm_dtype", "norms_fp32"), "model.norms_in_fp32"),
    **dict.fromkeys(("model_name_or_path", "pretrain"), "model.path"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "param_dtype", "model_dtype", "megatron.dtype"), "model.dtype"),
    "fp8_format": "model.fp8",
    **dict.fromkeys(("vanilla_mbridge", "use_mbridge"), "model.provider: mcore_bridge"),
    **dict.fromkeys(("lora_rank", "lora_r", "lora.rank", "adapter.r", "peft.dim"), f"adapter.rank, with {_LORA}"),
    **dict.fromkeys(("lora_alpha", "lora.alpha"), f"adapter.alpha, with {_LORA}"),
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora.target_modules"), f"adapter.targets, with {_LORA}"),
    **dict.fromkeys(("tuner_type", "train_type", "use_peft"), f"{_LORA}, or null for all weights"),
    "lora_dropout": "adapter.dropout, which must be 0",
    "adapters": "adapter.path",
    # mixtures of experts
    **dict.fromkeys(("moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coef"), "moe.aux_loss_coeff"),
    "moe_z_loss_coeff": "moe.z_loss_coeff",
    "moe_router_dtype": "moe.router_dtype",
    "moe_token_dispatcher_type": "moe.token_dispatcher",
    "moe_enable_deepep": "moe.token_dispatcher: flex",
    **dict.fromkeys(("router_replay_mode", "router_replay.mode"), "moe.router_replay"),
    # data and rewards
    **dict.fromkeys(("train_files", "dataset", "dataset_name", "prompt_data", "prompt_dataset"), "data.train"),
    **dict.fromkeys(("val_files", "val_dataset", "eval_dataset", "eval.dataset"), "data.eval"),
    "train_data_ratio": "data.train_ratio",
    "split_dataset_ratio": "data.train_ratio, which is the share that is trained on",
    **dict.fromkeys(("input_key", "dataset_prompt_column"), "data.prompt_key"),
    **dict.fromkeys(("apply_chat_template", "use_chat_template"), "data.chat_template"),
    **dict.fromkeys(
        ("apply_chat_template_kwargs", "enable_thinking"), "data.chat_template_kwargs, such as {enable_thinking: false}"
    ),
    "system": "data.system_prompt",
    **dict.fromkeys(("dataset_shuffle", "shuffle_dataset"), "data.shuffle"),
    "data_seed": "run.seed",
    **dict.fromkeys(
        (
            *("reward_funcs", "custom_reward_function.path", "custom_reward_function.name", "remote_rm_url"),
            *("external_plugins", "reward.remote_url"),
        ),
        "reward.functions",
    ),
    **dict.fromkeys(
        (
            "reward_model",
            "reward_model_path",
            "reward_model.model.path",
            "reward_pretrain",
            "reward_model_name_or_path",
        ),
        "reward.models, and a term {function: reward_model} of reward.functions",
    ),
    **dict.fromkeys(
        ("overlong_buffer_len", "overlong_penalty_factor", "soft_max_length", "soft_cache_length"),
        "reward.functions, where the function length takes target and limit",
    ),
    "reward_weights": "reward.functions, where each has a weight",
    # the run
    **dict.fromkeys(("train_iters", "total_training_steps"), "run.max_steps"),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes"), _EPOCHS),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path", "ckpt_path", "ckpt.path"), "run.dir"),
    **dict.fromkeys(
        ("run_name", "experiment_name", "wandb_run_name", "wandb_exp_name", "swanlab_exp_name"), "run.name"
    ),
    **dict.fromkeys(("full_determinism", "full_determinism_enable"), "run.deterministic"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), "checkpoint.interval"),
    **dict.fromkeys(
        ("save_total_limit", "max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_ckpt_num", "ckpt.max_num"),
        "checkpoint.keep",
    ),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval", "eval_strategy", "eval.steps"), "eval.interval"),
    **dict.fromkeys(("val_before_train", "eval_on_start"), "eval.before"),
    **dict.fromkeys(("num_generations_eval", "eval_n_samples_per_prompt", "val_kwargs.n"), "eval.samples"),
    "eval.n_samples_per_prompt": "eval.samples",
    **dict.fromkeys(("eval_temperature", "val_kwargs.temperature"), "eval.temperature"),
    **dict.fromkeys(("eval_top_p", "val_kwargs.top_p"), "eval.top_p"),
    **dict.fromkeys(("eval_top_k", "val_kwargs.top_k"), "eval.top_k"),
    **dict.fromkeys(("eval_max_response_len", "eval_max_new_tokens"), "eval.max_tokens"),
    **dict.fromkeys(("eval.sets", "eval_datasets", "eval.datasets"), "data.eval_sets"),
    **dict.fromkeys(("val_max_samples", "eval_iters"), "eval.max_prompts"),
    **dict.fromkeys(
        ("report_to", "logger", "use_wandb", "use_tensorboard"),
        "tracking.wandb, tracking.tensorboard, tracking.mlflow, tracking.trackio and tracking.swanlab",
    ),
    **dict.fromkeys(("project_name", "logger.wandb.project"), "tracking.wandb_project"),
    "swanlab_project": "tracking.project",
    **dict.fromkeys(("wandb_org", "wandb.org"), "tracking.wandb_entity"),
    **dict.fromkeys(("log_completions", "log_val_generations", "num_completions_to_print"), "tracking.samples"),
}


def here(name: str) -> str | None:
    """Return what to write instead of a name of another project: as much of its end counts as is known."""
    parts = name.lower().split(".")
    ends = (".".join(parts[number:]) for number in range(len(parts)))
    return next((PEER_NAMES[end] for end in ends if end in PEER_NAMES), None)


def inside(content: object, path: str, own: Mapping[str, str], most: int = 3) -> list[str]:
    """Return what to write instead of at most `most` settings below `path`, a section that only other projects have.

    `own`: our keys, also by their last part where one alone has it: a setting that ends like one is taken for it.
    """
    if isinstance(content, Mapping):
        return [text for name, value in content.items() for text in inside(value, f"{path}.{name}", own, most)][:most]
    found = here(path) or own.get(".".join(path.split(".")[-2:])) or own.get(path.rpartition(".")[2])
    return [f"{path} is {found}"] if found is not None else []
