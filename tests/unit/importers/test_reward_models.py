"""Reward models of other projects become reward.models here, or are told of where other functions have a part, too."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import convert

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
SWIFT = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10 --beta 0 --model q"
HF = "swift rlhf --rlhf_type grpo --tuner_type full --num_generations 4 --max_steps 10 --beta 0 --model q"
TRL = (
    "trl grpo --model_name_or_path q --dataset_name d --num_generations 8 --per_device_train_batch_size 8 --max_steps 9"
)
PYTHON = """
from trl import GRPOConfig, GRPOTrainer
def near(completions, **kwargs):
    return [0.0 for _ in completions]
args = GRPOConfig(num_generations=8, per_device_train_batch_size=8, max_steps=9{more})
GRPOTrainer(model="q", reward_funcs={functions}, args=args, train_dataset=data).train()
"""


def left(found: Any) -> dict[str, str]:
    return {item.name: item.why for item in found.left}


@pytest.mark.parametrize("section", ["reward_model", "reward.reward_model"])
def test_the_reward_model_of_verl(section: str) -> None:
    given = {
        "enable": "True",
        "model.path" if section == "reward_model" else "model_path": "org/rm",
        "rollout.tensor_model_parallel_size": 2,
        "rollout.gpu_memory_utilization": 0.4,
        "rollout.dtype": "bfloat16",
        "rollout.prompt_length": 2048,
        "rollout.response_length": 1024,
        "enable_resource_pool": "True",
        "n_gpus_per_node": 4,
    }
    found = convert(f"{VERL} {' '.join(f'{section}.{name}={value}' for name, value in given.items())}")
    (model,), (term,) = found.config.reward.models, found.config.reward.functions
    assert (model.path, model.kind, model.tensor_parallel_size) == ("org/rm", "classification", 2)
    assert (model.gpu_memory_utilization, model.dtype, model.max_length) == (0.4, "bfloat16", 3072)
    assert found.config.reward.model_of(term) is model
    apart = {f"{section}.enable_resource_pool", f"{section}.n_gpus_per_node"}
    assert apart == {name for name in left(found) if name.startswith(section)}
    assert "share the GPUs" in left(found)[f"{section}.enable_resource_pool"]


def test_one_that_is_off_or_asked_by_a_function_is_not_put() -> None:
    assert convert(f"{VERL} reward_model.enable=False reward_model.model.path=org/rm").config.reward.models == ()
    asked = "reward_model.enable=True reward_model.model.path=org/rm custom_reward_function.path=a.py"
    found = convert(f"{VERL} {asked}")
    assert found.config.reward.models == () and found.config.reward.functions == ()
    assert "asks it: give reward.models (name: reward_model, path: org/rm)" in left(found)["reward_model.enable"]


@pytest.mark.parametrize("run", [SWIFT, HF])
def test_reward_models_of_ms_swift(run: str) -> None:
    found = convert(f"{run} --reward_model org/a org/b --reward_weights 1 0.5")
    assert [model.path for model in found.config.reward.models] == ["org/a", "org/b"]
    terms = found.config.reward.functions
    assert [found.config.reward.model_of(term).path for term in terms] == ["org/a", "org/b"]  # type: ignore[union-attr]
    assert [term.weight for term in terms] == [1.0, 0.5]
    plugged = convert(f"{run} --reward_model org/a --reward_model_plugin genrm")
    assert plugged.config.reward.models == () and "the plugin genrm asks it" in left(plugged)["reward_model"]
    mixed = convert(f"{run} --reward_model org/a --reward_funcs accuracy --reward_weights 1 1")
    assert mixed.config.reward.functions == () and "path: org/a" in left(mixed)["reward_model"]
    assert "reward functions differ" in left(mixed)["reward_funcs"] and "part of" in left(mixed)["reward_weights"]


def test_models_beside_a_server_are_set_apart() -> None:
    """Engines that generate while the trainer works leave their GPUs to no other."""
    served = convert(f"{SWIFT} --reward_model org/a --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.1")
    assert served.config.rollout.mode == "server"
    assert [model.placement for model in served.config.reward.models] == ["apart"]
    assert convert(f"{SWIFT} --reward_model org/a").config.reward.models[0].placement == "colocate"


def test_models_among_the_functions_of_trl() -> None:
    for run in (f"{TRL} --reward_funcs org/rm", f"{TRL} --reward_model_name_or_path org/rm"):
        found = convert(run)
        assert [model.path for model in found.config.reward.models] == ["org/rm"], run
        assert [term.function for term in found.config.reward.functions] == ["reward_model"]
    mixed = convert(f"{TRL} --reward_model_name_or_path org/rm --reward_funcs accuracy_reward")
    assert mixed.config.reward.models == () and "path: org/rm" in left(mixed)["reward_model_name_or_path"]


def test_models_in_a_python_file_of_trl() -> None:
    found = convert(PYTHON.format(functions='["org/a", "org/b"]', more=", reward_weights=[1.0, 0.5]"))
    assert [model.path for model in found.config.reward.models] == ["org/a", "org/b"]
    assert [term.weight for term in found.config.reward.functions] == [1.0, 0.5]
    for functions in ("near", '[near, "org/a"]'):
        found = convert(PYTHON.format(functions=functions, more=""))
        assert found.config.reward.models == () and found.config.reward.functions == ()
    assert "path: org/a" in left(found)["reward_funcs"]
