"""Defaults of other projects that differ from ours are in the config, or told (a second or two).

It would catch a run that takes our default where the original has another: the engine's share of a GPU, prompts that go
through a chat template, a schedule, and the balance of experts.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import convert

SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4"
MEGATRON = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type grpo --num_generations 4"
ROLLOUT, OPTIM = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
TRL = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --per_device_train_batch_size 4"


@pytest.mark.parametrize(
    ("run", "engine"),
    [
        (VERL, {"gpu_memory_utilization": 0.5}),
        (f"{VERL} {ROLLOUT}.gpu_memory_utilization=0.8", {"gpu_memory_utilization": 0.8}),
        (
            f"{VERL} {ROLLOUT}.max_num_seqs=64 {ROLLOUT}.enforce_eager=True",
            {"gpu_memory_utilization": 0.5, "max_num_seqs": 64, "enforce_eager": True},
        ),
        (SWIFT, {}),  # transformers generates
        (f"{SWIFT} --use_vllm true", {"gpu_memory_utilization": 0.9}),
        (MEGATRON, {"gpu_memory_utilization": 0.9}),
        (f"{MEGATRON} --vllm_gpu_memory_utilization 0.4", {"gpu_memory_utilization": 0.4}),
        (TRL, {}),  # transformers generates
        (f"{TRL} --use_vllm", {"gpu_memory_utilization": 0.3}),
        (f"{TRL} --use_vllm --vllm_gpu_memory_utilization 0.7", {"gpu_memory_utilization": 0.7}),
    ],
)
def test_the_share_of_a_gpu_is_that_of_the_original(run: str, engine: dict[str, Any]) -> None:
    found = convert(run)
    assert found.config.rollout.engine == engine
    text = " ".join(found.text.replace("#", " ").split())
    assumed = [name for name in ("gpu_memory_utilization", "max_num_seqs") if name in engine and name not in run]
    told = f"{' and '.join(assumed)}: default of {found.project}"
    assert (told in text) is bool(assumed)


def test_a_share_that_is_not_known_is_the_default_and_open() -> None:
    found = convert(f"{VERL} {ROLLOUT}.gpu_memory_utilization=$SHARE")
    assert found.config.rollout.engine["gpu_memory_utilization"] == 0.5
    assert found.open == (f"{ROLLOUT}.gpu_memory_utilization=$SHARE",)


@pytest.mark.parametrize(
    ("serve", "run"),
    [
        ("swift rollout --model m --vllm_tensor_parallel_size 1", f"{SWIFT} --use_vllm true --vllm_mode server"),
        ("trl vllm-serve --model m", f"{TRL} --use_vllm --vllm_mode server"),
    ],
)
def test_a_server_has_the_share_that_its_own_command_gives(serve: str, run: str) -> None:
    prefix = "--vllm_" if serve.startswith("swift") else "--"
    default = convert(f"{serve} &\n{run} --vllm_gpu_memory_utilization 0.2\n")
    assert default.config.rollout.engine == {"gpu_memory_utilization": 0.9}
    assert "server" in next(item.why for item in default.left if item.name == "vllm_gpu_memory_utilization")
    given = convert(f"{serve} {prefix}gpu_memory_utilization 0.6 &\n{run}\n")
    assert given.config.rollout.engine == {"gpu_memory_utilization": 0.6}
    absent = convert(run)
    assert absent.config.rollout.engine == {"gpu_memory_utilization": 0.9}
    with pytest.raises(ValueError, match="gpu_memory_utilization=60: must be above 0 and at most 1"):
        convert(f"{serve} {prefix}gpu_memory_utilization 60 &\n{run}\n")
    unknown = convert(f"{serve} {prefix}gpu_memory_utilization $SHARE &\n{run}\n")
    assert unknown.config.rollout.engine == {"gpu_memory_utilization": 0.9}
    assert "gpu_memory_utilization=$SHARE" in unknown.open


@pytest.mark.parametrize(
    ("run", "template"),
    [
        (TRL, False),
        (f"{TRL} --chat_template_kwargs '{{\"enable_thinking\": false}}'", False),
        (f"{TRL} --system_prompt Think.", True),  # open-r1 makes messages of it and the prompt
        (f"{TRL} --dataset_prompt_column problem", True),
        (SWIFT, True),
        (f"{SWIFT} --use_chat_template false", False),
        (VERL, True),
    ],
)
def test_a_prompt_that_is_a_text_gets_a_chat_template_where_it_has_one_there(run: str, template: bool) -> None:
    assert convert(run).config.data.chat_template is template


def test_the_column_of_prompts_is_carried_over() -> None:
    assert convert(f"{TRL} --dataset_prompt_column problem").config.data.prompt_key == "problem"


@pytest.mark.parametrize(
    ("words", "style", "least"),
    [
        ("", "constant", 0.0),
        ("model_engine=megatron", "constant", 0.0),
        ("model_engine=veomni", "cosine", 0.0),
        (f"model_engine=veomni {OPTIM}.lr_min=1e-7", "cosine", 1e-7),
        (f"model_engine=veomni {OPTIM}.min_lr=1e-7", "cosine", 0.0),
        (f"model_engine=veomni {OPTIM}.lr_scheduler_type=constant", "constant", 0.0),
        (f"{OPTIM}.lr_min=1e-7", "constant", 0.0),
    ],
)
def test_the_schedule_of_verl_is_that_of_what_trains(words: str, style: str, least: float) -> None:
    optimizer = convert(f"{VERL} {words}").config.optimizer
    assert (optimizer.lr_decay_style, optimizer.min_lr) == (style, least)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("openai/gpt-oss-20b", True),
        ("Qwen/Qwen3-8B", False),
        ("/moe/Qwen2.5-7B-Instruct", False),
        ("Qwen/Qwen3-30B-A3B --router_aux_loss_coef 0", False),
        ("Qwen/Qwen3-30B-A3B --router_aux_loss_coef 0.01", False),
    ],
)
def test_trl_balances_experts_where_nothing_is_said(model: str, told: bool) -> None:
    found = convert(f"{TRL} --model_name_or_path {model}")
    assert any(line.startswith("router_aux_loss_coef is 0.001 where it is not given") for line in found.assumed) is told
    reasons = {item.name: item.why for item in found.left}
    assert ("over all layers together" in reasons.get("router_aux_loss_coef", "")) is model.endswith("0.01")


TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
BALANCED = f"{VERL} actor_rollout_ref.actor.strategy=megatron +{TRANSFORMER}.moe_aux_loss_coeff=0.01"
KIND = f"+{TRANSFORMER}.moe_router_load_balancing_type"


@pytest.mark.parametrize(
    ("words", "weight", "why"),
    [
        ("", 0.0, "which verl sets unless it is given (for GLM-4 MoE mbridge does not)"),
        (f"{KIND}=none", 0.0, "no effect with moe_router_load_balancing_type=none"),
        (f"{KIND}=aux_loss", 0.01, ""),
        (f"{KIND}=seq_aux_loss", 0.0, "belongs to moe_router_load_balancing_type=seq_aux_loss"),
        (f"{KIND}=$KIND", 0.0, "belongs to"),
    ],
)
def test_verl_switches_the_balance_of_experts_off_unless_it_is_told_otherwise(
    words: str, weight: float, why: str
) -> None:
    found = convert(f"{BALANCED} {words}")
    assert found.config.moe.aux_loss_coeff == weight
    reasons = {item.name: item.why for item in found.left}
    assert why in reasons.get(f"{TRANSFORMER}.moe_aux_loss_coeff", "")
    assert bool(why) == (f"{TRANSFORMER}.moe_aux_loss_coeff" in reasons)


@pytest.mark.parametrize(
    ("words", "after"),
    [("", False), ("trainer.test_freq=-1", False), ("trainer.test_freq=0", False), ("trainer.test_freq=5", True)],
)
def test_verl_evaluates_at_the_end_only_if_it_does_so_on_the_way(words: str, after: bool) -> None:
    found = convert(f"{VERL} data.val_files=test.parquet {words}")
    assert (found.config.eval.before, found.config.eval.after) == (True, after)
    assert ("verl evaluates neither during training nor after it (up to 0.2, after it)" in found.text) is not after


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (f"{VERL} actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", True),
        (f"{VERL} actor_rollout_ref.model.path=Qwen/Qwen3-8B", False),
        (
            f"{VERL} actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
            f"+{TRANSFORMER}.moe_router_dtype=fp32",
            False,
        ),
        (f"{VERL} actor_rollout_ref.model.path=Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        (  # its bridge to Megatron has float32, too
            f"{VERL} actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.model.path=Qwen/Qwen3-Next-80B-A3B-Instruct",
            False,
        ),
        (f"{SWIFT} --model Qwen/Qwen3-30B-A3B", True),
        (f"{MEGATRON} --model Qwen/Qwen3-30B-A3B", False),  # float32 there, too
        (f"{TRL} --model_name_or_path mistralai/Mixtral-8x7B-v0.1", True),
        (f"{TRL} --model_name_or_path deepseek-ai/DeepSeek-V3", False),
    ],
)
def test_the_type_that_routers_compute_in_is_told_where_it_is_another(run: str, told: bool) -> None:
    assert any(line.startswith("the router of experts computes in") for line in convert(run).assumed) is told


@pytest.mark.parametrize(
    ("words", "told"),
    [("trainer.save_freq=10", True), ("", False), ("trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=3", False)],
)
def test_it_is_told_that_verl_keeps_all_checkpoints(words: str, told: bool) -> None:
    assert sum(line.startswith("checkpoints: all are kept") for line in convert(f"{VERL} {words}").differs) == told
