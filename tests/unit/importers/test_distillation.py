"""On-policy distillation of verl and ms-swift becomes a teacher here only where it is the same thing. Takes seconds.

It would catch a distillation that is carried over as another one, that loses its weight or its rewards, or that is
refused without the reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import Converted, convert

LOSS, MODELS = "distillation.distillation_loss", "distillation.teacher_models"
ACTOR, TEACHER = "actor_rollout_ref.actor", f"{MODELS}.teacher_model.model_path=big/model"
PLAIN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    f"{ACTOR}.ppo_mini_batch_size=64"
)
GROUP = f"{PLAIN} actor_rollout_ref.rollout.n=8"
VERL = f"{GROUP} distillation.enabled=True {TEACHER}"
SIGNAL = f"{LOSS}.use_policy_gradient=True {LOSS}.loss_mode=k1"
ALONE = f"{LOSS}.use_task_rewards=False"
HF = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --tuner_type full --max_steps 5"
MEGATRON = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --train_iters 10"
TAUGHT = "--beta 0 --teacher_model big/model"


def signal(found: Converted) -> tuple[Any, ...]:
    ours = found.config.algorithm
    return (ours.teacher, ours.kl_estimator, ours.kl_beta, ours.kl_placement)


def alone(found: Converted) -> bool:
    """Return whether the YAML says that no function grades, and asks for none."""
    needed = found.text.partition("# A run also needs:")[2].partition("# Carried over:")[0]
    assert ("functions: []" in found.text) is ("reward.functions" not in needed), found.text
    return "functions: []" in found.text


@pytest.mark.parametrize(
    ("more", "estimator", "weight", "without_rewards"),
    [
        (SIGNAL, "unbiased", 1.0, False),
        (f"{SIGNAL} {LOSS}.distillation_loss_coef=0.3", "unbiased", 0.3, False),
        (f"{SIGNAL} {ALONE}", "unbiased", 1.0, True),
        (f"{SIGNAL} {ALONE} {LOSS}.distillation_loss_coef=0.3", "unbiased", 1.0, True),  # which is not read
        ("", "k3", 1.0, False),
        (f"{LOSS}.loss_mode=low_var_kl {ALONE}", "k3", 1.0, True),
        (f"{LOSS}.loss_mode=mse", "k2", 1.0, False),
        (f"{LOSS}.loss_mode=abs", "absolute", 1.0, False),
    ],
)
def test_a_distillation_of_verl(more: str, estimator: str, weight: float, without_rewards: bool) -> None:
    found = convert(f"{VERL} {more}")
    assert signal(found) == ("big/model", estimator, weight, "loss") and alone(found) is without_rewards
    told = any("it is read with use_task_rewards only" in item.why for item in found.left)
    assert told is (without_rewards and "coef" in more)
    assert any("multiplied by the clipped ratio" in line for line in found.differs) is (estimator == "unbiased")
    assert any("10 at most" in line for line in found.differs) is (estimator == "k3")


def test_bounds_of_the_signal_and_gpus_of_the_teacher_are_told() -> None:
    found = convert(f"{VERL} {LOSS}.loss_max_clamp=10.0 distillation.nnodes=2")
    assert any("loss_max_clamp=10.0: a token's signal from the teacher is bounded there" in d for d in found.differs)
    assert any("the teacher has GPUs of its own there" in line for line in found.differs)
    assert {item.name: item.why for item in found.left}[f"{LOSS}.loss_max_clamp"].endswith("has no bound here")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (f"{LOSS}.loss_mode=forward_kl_topk", "loss_mode=forward_kl_topk: a divergence over several tokens"),
        (f"{LOSS}.loss_mode=k1", "loss_mode=k1 without use_policy_gradient: as a term of the loss k1 has no gradient"),
        (f"{LOSS}.use_policy_gradient=True", "loss_mode is not given (its default is k3) with use_policy_gradient"),
        (f"{SIGNAL} {LOSS}.policy_loss_mode=gspo", "policy_loss_mode=gspo: the teacher's term has no gspo"),
        (f"{SIGNAL} {ACTOR}.use_kl_loss=True", "use_kl_loss=true: a KL term against the model's start beside"),
        (f"{SIGNAL} algorithm.use_kl_in_reward=True", "use_kl_in_reward=true: a KL term against the model's start"),
        (
            f"{SIGNAL} +{MODELS}.math.model_path=a +{MODELS}.code.model_path=b",
            f"{MODELS}.math.model_path=a, {MODELS}.code.model_path=b: here one teacher (algorithm.teacher)",
        ),
    ],
)
def test_another_distillation_of_verl_is_refused_by_name(more: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{VERL} {more}")
    assert expected in str(refused.value), refused.value


def test_a_teacher_beside_the_usual_entry_is_the_one_that_verl_takes() -> None:
    found = convert(f"{VERL} {SIGNAL} +{MODELS}.math.model_path=maths/model")
    assert found.config.algorithm.teacher == "maths/model"


def test_a_distillation_that_is_off_is_no_matter() -> None:
    mode = f"{LOSS}.loss_mode=forward_kl_topk"
    found = convert(f"{GROUP} {mode}")
    assert found.config.algorithm.teacher is None
    assert {item.given: item.why for item in found.left}[mode] == "settings of a teacher are not carried over"


def test_a_sampler_of_verl_that_leaves_out_prompts_is_told_what_does_so_here() -> None:
    found = convert(f"{GROUP} data.sampler.class_path=mine.py data.sampler.class_name=Curriculum")
    assert "data.no_resampling_pass_rate" in {item.name: item.why for item in found.left}["data.sampler.class_path"]


@pytest.mark.parametrize("run", [HF, MEGATRON])
@pytest.mark.parametrize(
    ("more", "weight", "without_rewards"),
    [
        ("", 1.0, True),
        ("--teacher_kl_coef 0.25", 0.25, True),
        ("--reward_funcs accuracy --teacher_kl_coef 0.25", 0.25, False),
    ],
)
def test_a_teacher_of_a_run_of_ms_swift(run: str, more: str, weight: float, without_rewards: bool) -> None:
    """There log q - log pi of a token is added to its advantage."""
    found = convert(f"{run} {TAUGHT} --num_generations 8 {more}", gpus=8)
    assert signal(found) == ("big/model", "unbiased", weight, "loss") and alone(found) is without_rewards
    assert any("multiplied by the clipped ratio" in line for line in found.differs)
    assert not any("neither reward_funcs" in line for line in found.assumed)


@pytest.mark.parametrize("run", [HF, MEGATRON])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--teacher_model m", "--teacher_model m with --beta 0.04, its default: a KL term against the model's start"),
        ("--teacher_model m --beta 0.1", "--beta 0.1: a KL term against the model's start"),
        (f"{TAUGHT} --importance_sampling_level sequence", "the ratio of the sequence carries the signal of one token"),
        (f"{TAUGHT} --teacher_kl_coef 0", "the teacher has no part in what is learnt"),
        ("--beta 0 --teacher_model_server http://a:1", "the teacher is a server there"),
        (f"{TAUGHT} --sdar_loss_coef 0.1", "the loss has a term of distillation then"),
    ],
)
def test_another_distillation_of_ms_swift_is_refused_by_name(run: str, more: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{run} --num_generations 8 {more}", gpus=8)
    assert expected in str(refused.value), refused.value


def test_settings_of_no_teacher_are_told() -> None:
    found = convert(f"{HF} --num_generations 8 --teacher_kl_coef 0.5", gpus=8)
    assert {item.name: item.why for item in found.left}["teacher_kl_coef"] == "it is read with teacher_model only"


def test_adapters_of_a_teacher_are_refused() -> None:
    with pytest.raises(ValueError, match="merge them into its weights"):
        convert(f"{HF} {TAUGHT} --num_generations 8 --teacher_adapters a", gpus=8)


@pytest.mark.parametrize("run", [HF, MEGATRON])
def test_gkd_is_told_what_is_like_it(run: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{run} --teacher_model m --num_generations 8".replace("type grpo", "type gkd"), gpus=8)
    assert "--rlhf_type gkd: only --rlhf_type grpo has a counterpart here; its divergence is" in str(refused.value)
    assert "its default" not in str(refused.value)


def test_one_completion_a_prompt_is_enough_where_a_teacher_alone_teaches() -> None:
    """As recipes of distillation have it; with rewards one completion has no group to compare with."""
    for text in (f"{PLAIN} distillation.enabled=True {TEACHER} {SIGNAL} {ALONE}", f"{HF} {TAUGHT} --num_generations 1"):
        assert convert(text, gpus=8).config.batch.num_generations == 1
    for text in (
        f"{PLAIN} distillation.enabled=True {TEACHER} {SIGNAL}",
        f"{HF} {TAUGHT} --num_generations 1 --reward_funcs accuracy",
    ):
        with pytest.raises(ValueError, match="must be 2 or more"):
            convert(text, gpus=8)
