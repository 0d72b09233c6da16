"""Runs of verl and TRL as configs of ours, in the shape of published examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_hpc.importers.convert import convert
from gspo_hpc.planning.plan import make_plan

VERL_FSDP = r"""#!/usr/bin/env bash
set -xeuo pipefail
NNODES=${NNODES:-2}
loss_mode=gspo
MODEL_PATH=/models/Qwen2.5-3B-Instruct
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
n_resp_per_prompt=16
use_dynamic_bsz=true
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 2))
exp_name="${loss_mode}-run"
train_files="['/data/train.parquet']"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} \
    data.train_files="${train_files}" \
    data.val_files=/data/test.parquet \
    data.truncation='error' data.filter_overlong_prompts=true \
    data.train_batch_size=512 \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 3)) \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    trainer.logger='["console","wandb"]' trainer.project_name='RL-GSPO' trainer.experiment_name="${exp_name}" \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" \
    trainer.test_freq=10 trainer.save_freq=10 trainer.total_epochs=10 trainer.total_training_steps=500 $@ 2>&1 | tee log
"""

VERL_MEGATRON = r"""
backend=megatron
DATA=(
    data.train_files=/data/train.parquet   # prompts
    data.train_batch_size=1024
)
LAYOUT="
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
if [[ $backend == "megatron" ]]; then
    CONFIG_NAME=ppo_megatron_trainer
    ACTOR="$LAYOUT actor_rollout_ref.actor.megatron.param_offload=True"
else
    CONFIG_NAME=ppo_trainer
    ACTOR="actor_rollout_ref.actor.fsdp_config.param_offload=True"
fi
python3 -m verl.trainer.main_ppo --config-path=config --config-name=$CONFIG_NAME \
    algorithm.adv_estimator=grpo "${DATA[@]}" $ACTOR \
    actor_rollout_ref.model.path=$HOME/models/Qwen2-7B \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.n=4 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node=$GPUS trainer.nnodes=1 trainer.save_freq=20 trainer.total_epochs=15
"""

TRL_YAML = """
model_name_or_path: /models/Qwen2.5-1.5B-Instruct
dataset_name: AI-MO/NuminaMath-TIR
bf16: true
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.5
importance_sampling_level: sequence
loss_type: grpo
epsilon: 3e-4
epsilon_high: 4e-4
beta: 0.0
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
steps_per_generation: 32
num_generations: 16
num_iterations: 1
max_prompt_length: 512
max_completion_length: 1024
learning_rate: 1.0e-06
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.1
max_steps: 105
save_strategy: steps
save_steps: 50
eval_strategy: "no"
output_dir: data/Qwen2.5-1.5B-GSPO
report_to: [wandb]
push_to_hub: true
"""


def settings(text: str) -> dict[str, Any]:
    """The settings of a converted YAML, by dotted name."""
    return {f"{name}.{key}": value for name, part in yaml.safe_load(text).items() for key, value in part.items()}


def test_overrides_of_verl_count_prompts_and_rollouts() -> None:
    found = convert(VERL_FSDP)
    assert found.project == "verl"
    got = settings(found.text)
    assert {key: value for key, value in got.items() if key.startswith(("batch.", "run.", "cluster."))} == {
        "run.name": "gspo-run",
        "run.max_steps": 2000,  # 500 rollouts of 4 updates
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "batch.num_generations": 16,
        "batch.global_batch_size": 2048,  # 128 prompts x 16
        "batch.steps_per_generation": 4,  # 512 / 128
        "batch.micro_batch_tokens": 40960,  # 2 x 10240 a GPU, of 2 GPUs that share a sequence
        "batch.logprob_micro_batch_tokens": 61440,
    }
    assert got["parallel.context_parallel_size"] == 2
    assert got["algorithm.name"] == "gspo" and "algorithm.aggregation" not in got and "algorithm.kl_beta" not in got
    assert (got["algorithm.clip_low"], got["algorithm.clip_high"]) == (3e-4, 4e-4)
    assert (got["checkpoint.interval"], got["eval.interval"]) == (40, 40)
    assert got["optimizer.lr_warmup_steps"] == 100 and got["optimizer.weight_decay"] == 0.1
    assert (got["data.train"], got["data.eval"], got["data.overlong"]) == (
        "/data/train.parquet",
        "/data/test.parquet",
        "drop",
    )
    assert got["rollout.tensor_parallel_size"] == 1 and got["rollout.max_response_length"] == 8192
    assert got["tracking.wandb_project"] == "RL-GSPO" and "tracking.wandb" not in got
    assert "8192 of a rollout, 2048 of an update" in found.differs[0] and "multiplied by 4" in found.differs[1]
    assert "  global_batch_size: 2048 # ppo_mini_batch_size 128 prompts x n 16\n" in found.text
    dropped = "\n".join(found.dropped)
    assert "ppo_micro_batch_size_per_gpu=8: verl does not read it with use_dynamic_bsz" in dropped
    assert "kl_loss_coef=0.01: it is read with use_kl_loss only" in dropped
    plan = make_plan(found.config)
    assert plan.quantities["generation_batch_size"] == 8192 and plan.quantities["dp_size"] == 8


def test_verl_on_megatron_with_arrays_branches_and_variables() -> None:
    found = convert(VERL_MEGATRON, rows=7473)
    got = settings(found.text)
    assert got["parallel.tensor_model_parallel_size"] == got["parallel.pipeline_model_parallel_size"] == 2
    assert got["parallel.sequence_parallel"] is True  # a default of theirs
    assert got["memory.offload_trainer"] is True and got["memory.recompute_granularity"] == "full"
    assert got["batch.micro_batch_size"] == 4 and got["batch.logprob_micro_batch_size"] == 8
    assert got["batch.num_iterations"] == 2 and got["batch.global_batch_size"] == 1024
    assert (
        got["algorithm.name"] == "grpo"
        and got["algorithm.aggregation"] == "token"
        and got["algorithm.kl_beta"] == 0.001
    )
    assert got["run.max_steps"] == 15 * 7 * 4 * 2  # epochs, rollouts of an epoch, updates, passes
    assert got["checkpoint.interval"] == 160
    assert got["model.path"] == "$HOME/models/Qwen2-7B"
    assert "path: $HOME/models/Qwen2-7B # $HOME is set by the shell; write it out" in found.text
    assert got["cluster.gpus_per_node"] == 8
    assert any("$GPUS is not set in the script" in item for item in found.assumed)
    told = convert(VERL_MEGATRON, gpus=12)
    assert (told.config.cluster.nodes, told.config.cluster.gpus_per_node) == (2, 6)
    assert not any("$GPUS" in item for item in told.assumed)


@pytest.mark.parametrize(
    "flag", ["--config-name x", "--config-name=x", "-cn x", "-cn=x", "--config-path /a --foo -cn x"]
)
def test_flags_of_hydra_are_no_overrides_and_the_file_that_they_name_has_to_be_at_hand(flag: str) -> None:
    words = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_batch_size=64"
    words += " actor_rollout_ref.actor.ppo_mini_batch_size=32"
    plain = convert(f"python -m verl.trainer.main_ppo {words}")
    with pytest.raises(
        ValueError, match=r"^--config-name x.*: that file sets arguments of the run, and is not at hand"
    ):
        convert(f"python -m verl.trainer.main_ppo {flag} {words}")
    found = convert(f"python -m verl.trainer.main_ppo --foo {words}")
    assert found.config == plain.config and "--foo: no setting of the run" in found.dropped
    for own in ("-cn ppo_megatron_trainer", "--config-path=./config --config-name='ppo_megatron_trainer.yaml'"):
        megatron = convert(f"python -m verl.trainer.main_ppo {own} {words}")  # verl's own defaults are known
        assert megatron.config != plain.config
        assert [line for line in megatron.dropped if "config" in line and "its defaults are known" not in line] == []


def test_a_tilde_takes_out_a_section_with_all_its_keys() -> None:
    words = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_batch_size=64"
    words += " actor_rollout_ref.actor.ppo_mini_batch_size=32"
    optim = "actor_rollout_ref.actor.optim"
    plain = convert(f"python -m verl.trainer.main_ppo {words}")
    found = convert(f"python -m verl.trainer.main_ppo {words} {optim}.lr=1e-5 {optim}.clip_grad=3 ~{optim} ~data.x")
    assert found.config == plain.config
    assert f"~{optim}: taken out: {optim}.lr, {optim}.clip_grad" in found.dropped
    assert "~data.x: nothing is given before it to take out" in found.dropped
    again = convert(f"python -m verl.trainer.main_ppo {words} {optim}.lr=1e-5 ~{optim} {optim}.lr=2e-5")
    assert again.config.optimizer.lr == 2e-5


def test_nested_yaml_of_verl_is_the_same_as_its_overrides() -> None:
    nested = {
        "data": {"train_batch_size": 64, "max_prompt_length": 256, "max_response_length": "${data.max_prompt_length}"},
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 16, "ppo_micro_batch_size_per_gpu": 2, "optim": {"betas": [0.9, 0.95]}},
            "rollout": {"n": 8},
        },
        "trainer": {"nnodes": 1, "n_gpus_per_node": 4, "total_training_steps": 10},
    }
    found = convert(yaml.safe_dump(nested))
    words = (
        "data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=256 algorithm.adv_estimator=grpo "
        "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.ppo_mini_batch_size=16 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.optim.betas=[0.9,0.95] "
        "actor_rollout_ref.rollout.n=8 trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.total_training_steps=10"
    )
    assert convert(words).config == found.config
    assert found.config.algorithm.normalize_advantage is False and found.config.optimizer.adam_beta2 == 0.95
    assert found.config.rollout.max_response_length == 256 and found.config.run.max_steps == 40


def test_a_grpoconfig_of_trl_counts_micro_batches_of_one_process() -> None:
    found = convert(TRL_YAML, gpus=8)
    assert found.project == "TRL"
    assert settings(found.text) == {
        "run.name": "Qwen2.5-1.5B-GSPO",
        "run.max_steps": 105,
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 8,
        "model.path": "/models/Qwen2.5-1.5B-Instruct",
        "model.dtype": "bfloat16",
        "memory.recompute_granularity": "full",
        "batch.micro_batch_size": 4,
        "batch.global_batch_size": 256,  # 4 x 8 processes x 8 accumulated
        "batch.steps_per_generation": 4,  # 32 micro-batches, 8 of them an update
        "batch.num_generations": 16,
        "batch.num_iterations": 1,
        "data.chat_template": False,
        "data.overlong": "truncate_left",
        "rollout.max_prompt_length": 512,
        "rollout.max_response_length": 1024,
        "rollout.engine": {"gpu_memory_utilization": 0.5},
        "algorithm.name": "gspo",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.kl_beta": 0.0,
        "optimizer.lr": 1e-6,
        "optimizer.min_lr": 1e-7,
        "optimizer.lr_decay_style": "cosine",
        "optimizer.lr_warmup_steps": 11,  # a tenth of 105, rounded up
        "checkpoint.interval": 50,
    }
    dropped = "\n".join(found.dropped)
    assert "dataset_name=AI-MO/NuminaMath-TIR: data.train takes JSONL, CSV or parquet, and datasets" in dropped
    assert "push_to_hub=true: nothing is sent to a hub" in dropped
    assert any("steps_per_generation counts micro-batches in TRL" in item for item in found.differs)
    one = convert(TRL_YAML)
    assert "1 GPU is assumed; give --gpus N" in one.assumed[0]
    assert one.config.batch.global_batch_size == 32


def test_trl_started_by_accelerate_with_two_files_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 16\n")
    (tmp_path / "grpo.yaml").write_text(TRL_YAML)
    command = (
        "accelerate launch --config_file zero3.yaml --num_processes=12 src/grpo.py --config grpo.yaml --max_steps 7"
    )
    found = convert(f"ACCELERATE_LOG_LEVEL=info \\\n  {command} --vllm-mode colocate", folder=tmp_path)
    got = settings(found.text)
    assert (got["cluster.nodes"], got["cluster.gpus_per_node"]) == (2, 6)  # the option goes before the file
    assert got["run.max_steps"] == 7 and got["batch.global_batch_size"] == 4 * 12 * 8
    assert got["optimizer.distributed"] is True
    with pytest.raises(ValueError, match=r"grpo\.yaml, which the command reads, is not there"):
        convert(command, folder=tmp_path / "elsewhere")


def test_the_server_of_trl_and_rollouts_smaller_than_an_update() -> None:
    text = (
        "trl vllm-serve --model /m --tensor-parallel-size 2 --data-parallel-size 1 &\n"
        "accelerate launch --num_processes 6 train_grpo.py --model_name_or_path /m --use_vllm --vllm_mode server "
        "--vllm_server_host 10.0.0.1 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
        "--steps_per_generation 2 --num_generations 4 --max_steps 3 --learning_rate 2e-6 --importance_sampling_level "
        "sequence"
    )
    found = convert(text)
    got = settings(found.text)
    assert (got["cluster.gpus_per_node"], got["rollout.engines_per_node"], got["rollout.tensor_parallel_size"]) == (
        8,
        1,
        2,
    )
    assert (got["batch.global_batch_size"], got["batch.steps_per_generation"]) == (48, 1)
    assert any("2 rollouts in TRL, all sampled by the same weights" in item for item in found.differs)
    assert any(item.startswith("loss_type dapo, the default there, weighs a sequence by") for item in found.differs)
    assert got["algorithm.name"] == "gspo" and "algorithm.aggregation" not in got


SMALL = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nnum_generations: 8\nmax_steps: 20\n"


@pytest.mark.parametrize(("given", "found"), [("", -1), ("top_k: 0", -1), ("top_k: 20", 20)])
def test_trl_samples_from_all_tokens_with_0(given: str, found: int) -> None:
    assert convert(SMALL + given, "trl", gpus=2).config.rollout.top_k == found


@pytest.mark.parametrize(("steps", "nearest"), [(12, "nearest: 8 or 16"), (3, "nearest: 8")])
def test_rollouts_of_trl_that_are_no_whole_updates_are_refused_with_those_that_are(steps: int, nearest: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{SMALL}steps_per_generation: {steps}", "trl", gpus=2)
    assert str(refused.value).endswith(nearest)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("python -m verl.trainer.main_ppo --config-path=conf --config-name=own", "conf/own.yaml"),
        ("trl grpo --config conf/own.yaml", "conf/own.yaml"),
        ("swift rlhf conf/own.yaml --rlhf_type grpo", "conf/own.yaml"),
    ],
)
def test_a_mistake_in_a_yaml_names_that_file(tmp_path: Path, command: str, file: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / file).write_text("a: 1\nb: [2\n")
    with pytest.raises(ValueError, match=rf"^{file}: .*line \d"):
        convert(f"{command}\n", folder=tmp_path, name="run.sh")


def test_a_name_that_is_cut_is_told() -> None:
    run = "trl grpo --model_name_or_path m --num_generations 8 --per_device_train_batch_size 8 --run_name "
    for length, cut in ((100, False), (101, True), (150, True)):
        found = convert(run + "n" * length, gpus=1)
        assert found.config.run.name == "n" * 100
        told = f"run_name: of its {length} characters, run.name has the first 100"
        assert (told in found.assumed) is cut
