"""Names that other projects have for settings, and the settings to write here instead."""

from __future__ import annotations

from collections.abc import Mapping

_CLIP = "algorithm.clip_low and algorithm.clip_high"
_EPOCHS = "run.max_epochs"
_DUAL = "algorithm.dual_clip, the bound of ratios with a negative advantage"

# TRL, ms-swift, verl and OpenRLHF, in lower case. Sizes that count prompts there say that they count completions here.
PEER_NAMES = {
    "epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "clip_eps": _CLIP,
    "epsilon_low": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "beta": "algorithm.kl_beta",
    "kl_coef": "algorithm.kl_beta",
    "kl_loss_coef": "algorithm.kl_beta",
    "eps_clip": _CLIP,
    "eps_clip_low_high": _CLIP,
    "eps_clip_low": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "delta": _DUAL,
    "clip_ratio_c": _DUAL,
    **dict.fromkeys(("attn_impl", "attn_implementation", "attn_backend"), "model.attention_backend"),
    "importance_sampling_level": (
        "algorithm.name: gspo for sequence, gspo_token for sequence_token, and grpo for token"
    ),
    "loss_mode": "algorithm.name",
    "adv_estimator": "algorithm.name",
    "loss_type": "algorithm.aggregation",
    "loss_agg_mode": "algorithm.aggregation",
    "scale_rewards": "algorithm.normalize_advantage",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_advantage",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "micro_train_batch_size": "batch.micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "batch.logprob_micro_batch_size",
    "ppo_max_token_len_per_gpu": "batch.micro_batch_tokens",
    "mini_batch_size": "batch.global_batch_size, which counts completions, not prompts",
    "ppo_mini_batch_size": "batch.global_batch_size, which counts completions, not prompts",
    "train_batch_size": "batch.generation_batch_size, which counts completions, not prompts",
    "rollout_batch_size": "batch.generation_batch_size, which counts completions, not prompts",
    "gradient_accumulation_steps": "batch.global_batch_size, from which it follows",
    "n": "batch.num_generations",
    "group_size": "batch.num_generations",
    "num_return_sequences": "batch.num_generations",
    "n_samples_per_prompt": "batch.num_generations",
    "ppo_epochs": "batch.num_iterations",
    "max_completion_length": "rollout.max_response_length",
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), "rollout.truncated: mask"),
    **dict.fromkeys(("dynamic_sample", "filter_groups"), "rollout.dynamic_sampling"),
    "max_resample_times": "rollout.max_num_gen_batches, which counts the first batch as well",
    "max_response_len": "rollout.max_response_length",
    "max_new_tokens": "rollout.max_response_length",
    "generate_max_len": "rollout.max_response_length",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_mode": "rollout.mode",
    "learning_rate": "optimizer.lr",
    "actor_learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.lr_decay_style",
    "warmup_steps": "optimizer.lr_warmup_steps",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"),
        "optimizer.lr_warmup_steps, which counts steps: write the ratio times run.max_steps",
    ),
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
    "sp": "parallel.sequence_parallel",
    "max_grad_norm": "optimizer.clip_grad",
    "grad_clip": "optimizer.clip_grad",
    "train_iters": "run.max_steps",
    "total_training_steps": "run.max_steps",
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "output_dir": "run.dir",
    "model_name_or_path": "model.path",
    "train_files": "data.train",
    "val_files": "data.eval",
    "train_data_ratio": "data.train_ratio",
    "split_dataset_ratio": "data.train_ratio, which is the share that is trained on",
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.interval",
    "save_freq": "checkpoint.interval",
    "eval_steps": "eval.interval",
    "test_freq": "eval.interval",
}


def here(name: str) -> str | None:
    """Return what to write instead of a name of another project, whose last part alone may be known."""
    return PEER_NAMES.get(name.rpartition(".")[2].lower())


def inside(content: object, path: str, most: int = 3) -> list[str]:
    """Return what to write instead of at most `most` settings below `path`, a section that only other projects have."""
    if not isinstance(content, Mapping):
        return [f"{path} is {found}"] if (found := here(path)) is not None else []
    return [text for name, value in content.items() for text in inside(value, f"{path}.{name}", most)][:most]
