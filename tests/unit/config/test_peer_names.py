"""Settings under the names of other projects: answered with ours (milliseconds)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gspo_hpc import importers
from gspo_hpc.config.engine_arguments import VLLM_ARGUMENTS
from gspo_hpc.config.loader import ConfigError, from_dict, load
from gspo_hpc.config.reading.peer_names import PEER_NAMES
from gspo_hpc.config.schema import Config, keys


@pytest.mark.parametrize("name", PEER_NAMES)
def test_ours_are_settings_and_theirs_are_not(name: str) -> None:
    """A setting that is renamed here would be recommended under a name that does not exist."""
    ours = re.findall(rf"\b(?:{'|'.join(Config.model_fields)})\.\w+(?:\.\w+)?", PEER_NAMES[name])
    assert ours and {*ours} <= {*keys(), *(f"rollout.engine.{argument}" for argument in VLLM_ARGUMENTS)}
    assert name == name.lower() and not any(key.split(".")[1] == name for key in keys())


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"algorithm": {"epsilon": 0.2}}, "algorithm.epsilon; here it is algorithm.clip_low and algorithm.clip_high"),
        ({"learning_rate": 1e-6}, "unknown key learning_rate; here it is optimizer.lr"),
        ({"batch": {"ppo_mini_batch_size": 64}}, "here it is batch.global_batch_size, which counts completions"),
        ({"run": {"Num_Train_Epochs": 2}}, "here it is run.max_epochs"),
        ({"rollout": {"n": 8}}, "unknown key rollout.n; here it is batch.num_generations"),
        (
            {"actor_rollout_ref": {"actor": {"clip_ratio_low": 0.1, "x": 1}, "rollout": {"n": 8}}},
            "unknown section 'actor_rollout_ref'; here actor_rollout_ref.actor.clip_ratio_low is algorithm.clip_low, "
            "actor_rollout_ref.rollout.n is batch.num_generations",
        ),
        ({"model": {"attn_impl": "flash_attn"}}, "unknown key model.attn_impl; here it is model.attention_backend"),
        ({"parallel": {"tp": 2}}, "unknown key parallel.tp; here it is parallel.tensor_model_parallel_size"),
        ({"algorithm": {"eps_clip": 0.2}}, "eps_clip; here it is algorithm.clip_low and algorithm.clip_high"),
        ({"algorithm": {"delta": 2}}, "algorithm.delta; here it is algorithm.dual_clip, the bound"),
        ({"algorithm": {"importance_sampling_level": "sequence_token"}}, "gspo_token for sequence_token, and grpo for"),
        ({"optimizer": {"warmup_ratio": 0.1}}, "which counts steps: write the ratio times run.max_steps"),
        ({"actor": {"use_kl_loss": True}}, "here actor.use_kl_loss is algorithm.kl_beta above 0, which puts"),
        ({"algorithm": {"use_kl_in_reward": True}}, "here it is algorithm.kl_beta above 0 and algorithm.kl_placement"),
        # the same last part, of different things
        ({"rollout": {"tensor_model_parallel_size": 2}}, "here it is rollout.tensor_parallel_size"),
        ({"a": {"megatron": {"tensor_model_parallel_size": 2}}}, "is parallel.tensor_model_parallel_size"),
        ({"a": {"rollout": {"val_kwargs": {"temperature": 0.6}}}}, "is eval.temperature"),
        ({"a": {"rollout": {"temperature": 0.6}}}, "here a.rollout.temperature is rollout.temperature"),
        ({"a": {"ref": {"log_prob_micro_batch_size_per_gpu": 2}}}, "is batch.reference_micro_batch_size"),
        ({"eval": {"dataset": "x"}}, "unknown key eval.dataset; here it is data.eval"),
        ({"algo": {"kl": {"target": 1}}}, "here algo.kl.target is algorithm.kl_target"),
        ({"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}}, "here algorithm.kl_ctrl.kl_coef is algorithm.kl_beta"),
        ({"a": {"optim": {"lr": 1e-6}}}, "unknown section 'a'; here a.optim.lr is optimizer.lr"),
        (
            {"grpo": {"num_prompts_per_step": 4}},
            "grpo.num_prompts_per_step is batch.generation_batch_size, which counts",
        ),
        ({"grpo": {"num_generations_per_prompt": 4}}, "is batch.num_generations"),
        ({"loss_fn": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.2, "ratio_clip_c": 3}}, "is algorithm.dual_clip"),
        ({"loss_fn": {"ratio_clip_min": 0.1}}, "loss_fn.ratio_clip_min is algorithm.clip_low"),
        ({"loss_fn": {"reference_policy_kl_penalty": 0.1}}, "is algorithm.kl_beta"),
        ({"algorithm": {"use_on_policy_kl_approximation": True}}, "here it is algorithm.kl_estimator: unbiased"),
        ({"algorithm": {"use_importance_sampling_correction": True}}, "here it is algorithm.correction"),
        ({"algorithm": {"sequence_level_importance_ratios": True}}, "here it is algorithm.name: gspo for true"),
        ({"adapter": {"r": 8}}, "unknown key adapter.r; here it is adapter.rank"),
        ({"adapter": {"lora_alpha": 8}}, "here it is adapter.alpha"),
        ({"adapter": {"lora_dropout": 0.1}}, "here it is adapter.dropout, which must be 0"),
        ({"adapter": {"target_modules": ["q_proj"]}}, "here it is adapter.targets"),
        ({"trainer": {"total_epochs": 3}}, "unknown section 'trainer'; here trainer.total_epochs is run.max_epochs"),
    ],
)
def test_the_answer_names_the_setting(raw: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_dict(raw)


def test_the_algorithms_that_are_named_exist() -> None:
    names = set(re.findall(r"\bg[rs]po\w*", PEER_NAMES["importance_sampling_level"]))
    assert names == {"gspo", "gspo_token", "grpo"}
    for name in names:
        assert from_dict({"algorithm": {"name": name}}).algorithm.name == name


def test_a_name_without_its_section_is_answered_too() -> None:
    with pytest.raises(ConfigError, match=re.escape("'epsilon=0.2' is not a setting; here it is algorithm.clip_low")):
        load(None, ["epsilon=0.2"])


def _tables() -> Iterator[tuple[str, str]]:
    """Yield each argument of a project that the converters read as one of our keys, with that key."""
    for path in sorted(Path(importers.__file__).parent.glob("arguments/*.yaml")):
        for name, value in yaml.safe_load(path.read_text()).items():
            key = value.get("key") if isinstance(value, dict) else value
            if isinstance(key, str) and key in keys():  # a list has the names below a pattern
                yield name, key


@pytest.mark.parametrize(("name", "key"), sorted(set(_tables())))
def test_what_converters_read_as_one_of_our_keys_is_answered_with_it(name: str, key: str) -> None:
    if name == key:
        return
    with pytest.raises(ConfigError) as told:
        load(None, [f"{name}=1"])
    assert key in str(told.value)


# OpenRLHF's arguments that no converter reads, of August 2026 and before they had sections.
OPENRLHF = {
    "actor_num_nodes": "cluster.nodes",
    "actor.num_gpus_per_node": "cluster.gpus_per_node",
    "vllm.num_engines": "rollout.engines_per_node",
    "vllm.enforce_eager": "rollout.engine.enforce_eager",
    "vllm_gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "train.async_enable": "rollout.max_staleness",
    "ckpt.save_steps": "checkpoint.interval",
    "ckpt.max_num": "checkpoint.keep",
    "ckpt.output_dir": "run.dir",
    "actor.gradient_checkpointing_enable": "memory.recompute_granularity",
    "ds.adam_offload": "memory.offload_optimizer",
    "ds.attn_implementation": "model.attention_backend",
    "ds.lora.rank": "adapter.rank",
    "ds.ring_attn_size": "parallel.context_parallel_size",
    "train.max_tokens_per_gpu": "batch.micro_batch_tokens",
    "rollout.n_samples_per_prompt": "batch.num_generations",
    "rollout.max_new_tokens": "rollout.max_response_length",
    "train.seed": "run.seed",
    "actor.dual_clip": "algorithm.dual_clip",
    "algo.kl.init_coef": "algorithm.kl_beta",
    "algo.kl.use_loss": "algorithm.kl_placement",
    "algo.kl.estimator": "algorithm.kl_estimator",
    "algo.advantage.estimator": "algorithm.name",
    "algo.advantage.no_std_norm": "algorithm.normalize_advantage",
    "algo.advantage.is_correction_threshold": "algorithm.correction_high",
    "algo.dynamic_filtering_enable": "rollout.dynamic_sampling",
    "actor.entropy_coef": "algorithm.entropy_coef",
    "actor.model_name_or_path": "model.path",
    "data.prompt_dataset": "data.train",
    "data.input_key": "data.prompt_key",
    "data.apply_chat_template": "data.chat_template",
    "reward.remote_url": "reward.functions",
    "reward.overlong_buffer_len": "reward.functions",
    "eval.n_samples_per_prompt": "eval.samples",
    "logger.wandb.project": "tracking.wandb_project",
    "lr_warmup_ratio": "optimizer.lr_warmup_steps",
}


@pytest.mark.parametrize("name", OPENRLHF)
def test_what_openrlhf_has_too_is_answered(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\b{re.escape(OPENRLHF[name])}\b"):
        load(None, [f"{name}=1"])


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"tracking": {"wandb": "off"}}, "nearest: disabled"),
        ({"tracking": {"wandb": "none"}}, "nearest: disabled"),
        ({"moe": {"router_replay": "disabled"}}, "nearest: off"),
        ({"tracking": {"wandb": "offlin"}}, "nearest: offline"),
        ({"tracking": {"wandb": "cloud"}}, "which is not allowed; allowed: auto"),
        ({"algorithm": {"interval_of_policy": 1}}, "unknown key algorithm.interval_of_policy of gspo; allowed:"),
    ],
)
def test_the_nearest_value_or_key_is_one_that_is_near(raw: dict[str, dict[str, object]], told: str) -> None:
    """Words for nothing mean the value that says so: off had offline for its nearest."""
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_dict(raw)
