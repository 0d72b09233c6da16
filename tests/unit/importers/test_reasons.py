"""Reasons that are told are those of the argument, and defaults are the other project's. It takes about a second."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import convert

MEGATRON = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10"
TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 100"
ACTOR = "actor_rollout_ref.actor"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    f"{ACTOR}.ppo_mini_batch_size=32 trainer.n_gpus_per_node=8"
)
GROUPS = f"{VERL} actor_rollout_ref.rollout.n=8"
HEAD = "from functools import partial\nfrom transformers import HfArgumentParser\n"
HEAD += "from trl import GRPOConfig, GRPOTrainer, TrlParser\n"


def test_what_is_not_given_has_trls_default() -> None:
    found = convert(TRL, gpus=1).config.algorithm
    assert (found.clip_low, found.clip_high) == (0.2, 0.2)
    found = convert(f"{TRL} --epsilon 0.3 --epsilon_high 0.4", gpus=1).config.algorithm
    assert (found.clip_low, found.clip_high) == (0.3, 0.4)


@pytest.mark.parametrize(("given", "steps"), [("1", 1), ("2", 2), ("0.5", 50)])
def test_warmup_steps_are_a_share_of_the_run_only_below_1(given: str, steps: int) -> None:
    assert convert(f"{TRL} --warmup_steps {given}", gpus=1).config.optimizer.lr_warmup_steps == steps


@pytest.mark.parametrize(("kind", "told"), [("kl", True), ("mse", False), ("low_var_kl", False), ("k3", False)])
def test_another_estimator_of_the_divergence_is_told(kind: str, told: bool) -> None:
    found = convert(f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}")
    why = f"{ACTOR}.kl_loss_type={kind}: k1 has no gradient in expectation; the estimator here is k3 (low_var_kl)"
    assert (why in found.dropped) is told
    assert found.config.algorithm.kl_estimator == ("k2" if kind == "mse" else "k3")


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        (
            f"{GROUPS} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05 algorithm.kl_penalty=low_var_kl",
            "grpo",
            {"kl_beta": 0.05, "kl_placement": "reward", "kl_estimator": "k3"},
        ),
        (
            f"{GROUPS} algorithm.use_kl_in_reward=True",
            "grpo",
            {"kl_beta": 0.001, "kl_placement": "reward", "kl_estimator": "k1"},
        ),
        (f"{MEGATRON} --beta 0.1 --kl_in_reward true", "grpo", {"kl_placement": "reward", "kl_estimator": "k1"}),
        (
            f"{TRL} --use_adaptive_entropy true --entropy_target 5 --entropy_coef 0.01",
            "grpo",
            {"entropy_coef": 0.01, "entropy_target": 5.0},
        ),
        (
            f"{TRL} --beta 0.1 --sync_ref_model true --ref_model_sync_steps 64",
            "grpo",
            {"reference_interval": 64, "reference_mixup": 0.6},
        ),
        (
            f"{MEGATRON} --beta 0.1 --sync_ref_model true --ref_model_mixup_alpha 1",
            "grpo",
            {"reference_interval": 0, "reference_mixup": 1.0},
        ),
        (f"{TRL} --beta 0 --sync_ref_model true", "grpo", {"reference_interval": 0}),
        (f"{TRL} --entropy_target 5 --entropy_coef 0", "grpo", {"entropy_coef": 0.0, "entropy_target": 0.0}),
        (f"{TRL} --entropy_coef 0.01", "grpo", {"entropy_coef": 0.01}),
        (f"{GROUPS} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=0.9", "cispo", {"clip_low": 0.9}),
        (f"{GROUPS} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10", "cispo", {"clip_low": 1.0}),
        (f"{GROUPS} {ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=1.2", "sapo", {"gate_negative": 1.2}),
        (f"{GROUPS} {ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_high=0.4", "gmpo", {"clip_high": 0.4}),
        (f"{GROUPS} {ACTOR}.clip_ratio_c=4", "grpo", {"dual_clip": 4.0}),
        (f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+", "grpo", {"kl_estimator": "k2"}),
        (f"{TRL} --loss_type dr_grpo", "grpo", {"aggregation": "fixed_length"}),
        (f"{TRL} --loss_type cispo --epsilon_high 5", "cispo", {"clip_low": 1.0, "clip_high": 4.0}),
        (f"{TRL} --loss_type sapo --sapo_temperature_neg 1.1", "sapo", {"gate_negative": 1.1, "gate_positive": 1.0}),
        (f"{TRL} --delta 4", "grpo", {"dual_clip": 4.0}),
        (
            f"{TRL} --multi_objective_aggregation normalize_then_sum",
            "grpo",
            {"advantage": "gdpo", "normalize_advantage": False},
        ),
        (f"{TRL} --multi_objective_aggregation sum_then_normalize", "grpo", {"advantage": "group"}),
        (f"{TRL} --scale_rewards batch", "grpo", {"advantage": "batch_std", "normalize_advantage": False}),
    ],
)
def test_parts_of_other_objectives_are_carried_over(text: str, name: str, settings: dict[str, Any]) -> None:
    found = convert(text, gpus=8 if GROUPS in text else 1).config.algorithm
    assert found.name == name and {key: getattr(found, key) for key in settings} == settings


def test_a_micro_batch_size_that_is_not_known_is_told_as_such() -> None:
    name = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    found = convert(f'IFS=, read -rd "" -a P <<< "a,b,4"\n{GROUPS} {name}=${{P[2]}}')
    assert {item.name: item.why for item in found.left}[name].startswith("$P is read from the input by read")
    assert any(name in item for item in found.open) and "dynamic" not in str(found.left)
    assert not any("is not given" in line for line in found.assumed if name in line)
    assert convert(f"{GROUPS} {name}=4").config.batch.micro_batch_size == 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            " actor_rollout_ref.rollout.n=$N",
            "rollout.n=$N: $N takes several values in the loop of line 1; it must be 2",
        ),
        (" actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n=1: must be 2 or more"),
        ("", "actor_rollout_ref.rollout.n (its default is 1): must be 2 or more"),
    ],
)
def test_a_refusal_shows_no_value_that_nobody_wrote(given: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"for N in 4 8; do :; [ -f $N ] && break; done\n{VERL}{given}")
    assert told in str(refused.value)
    assert ("n=1" in str(refused.value)) is given.endswith("n=1") and "default is used" not in str(refused.value)


def test_a_penalty_for_long_answers_is_no_model() -> None:
    found = convert(f"{GROUPS} reward_model.overlong_buffer.enable=True reward_model.enable=True")
    why = {item.name: item.why for item in found.left}
    assert "no penalty for long answers, so reward.functions has" in why["reward_model.overlong_buffer.enable"]
    assert "it names no model" in why["reward_model.enable"]


@pytest.mark.parametrize(
    "made",
    [
        "(args,) = HfArgumentParser(GRPOConfig).parse_dict({'beta': 0.4, 'num_generations': 8})",
        "args = HfArgumentParser(GRPOConfig).parse_dict({'beta': 0.1, 'num_generations': 8})[0]\nargs.beta = 0.4",
        "MORE = {'beta': 0.4}\np = HfArgumentParser(GRPOConfig)\nargs = p.parse_dict(MORE)[0]",
        "p = TrlParser(GRPOConfig)\n(args,) = p.parse_args_and_config(args=['--beta', '0.4'])",
        "p = HfArgumentParser((GRPOConfig,))\n(args,) = p.parse_args_into_dataclasses(['--beta=0.4'])",
    ],
)
def test_what_a_parser_is_given_in_the_file_is_read(made: str) -> None:
    found = convert(f"{HEAD}{made}\nGRPOTrainer('m/m', args=args)\n", gpus=1)
    assert found.config.algorithm.kl_beta == 0.4 and found.open == ()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            "Mk = partial(GRPOConfig, beta=0.4)\nargs = Mk()",
            "line 4: Mk = partial(GRPOConfig, beta=0.4): the arguments",
        ),
        ("args = HfArgumentParser(GRPOConfig).parse_dict(load())[0]", "parse_dict(load()): the arguments of its GRPOC"),
        (
            "p = TrlParser(GRPOConfig)\np.set_defaults(beta=1)\n(args,) = p.parse_args_and_config(['--beta', '2'])",
            "line 6: p.parse_args_and_config",
        ),
        ("(args,) = TrlParser(GRPOConfig).parse_args_and_config()", "it takes its GRPOConfig from the command line"),
        ("args = None", "it makes a GRPOTrainer, and no GRPOConfig with arguments"),
        ("args = GRPOConfig(**yaml.safe_load(f))", "write GRPOConfig(name=value, ...) in its place"),
        ("args = GRPOConfig(output_dir='o', bf16=True, **c.train)", "**c.train: known only when the script runs, and"),
    ],
)
def test_a_config_that_is_not_read_is_refused_with_its_own_reason(made: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{HEAD}{made}\nGRPOTrainer('m/m', args=args)\n", gpus=1)
    assert told in str(refused.value) and "another trainer" not in str(refused.value)


@pytest.mark.parametrize(("sign", "told"), [("|", False), ("&", True), ("%", True), ("+", True)])
def test_only_a_union_of_types_leaves_a_trainer_as_it_is(sign: str, told: bool) -> None:
    made = "args = GRPOConfig(num_generations=8)\ntrainer = GRPOTrainer('m/m', args=args)\n"
    found = convert(f"{HEAD}{made}x = trainer {sign} tool\n", gpus=1)
    assert any(f"trainer {sign} tool" in item.name for item in found.left) is told


@pytest.mark.parametrize("value", ["$x", "$(count)", "${x}"])
def test_a_status_that_is_not_known_decides_nothing(value: str) -> None:
    script = f"LR=1e-6\nread x\nf() {{ return {value}; }}\nif f; then LR=2e-6; fi\n"
    found = convert(f"{script}{GROUPS} {ACTOR}.optim.lr=$LR")
    assert any("$LR depends on a condition in line 4" in line for line in found.assumed)
