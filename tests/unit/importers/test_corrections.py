"""Corrections of the gap between engine and trainer become those here only where the weights are the same.

A correction that is carried over with another meaning, or dropped without a word, would train something else. The
formulas are those of verl 0.9, TRL 1.9 and ms-swift 4.5. It takes about two seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import Converted, convert

TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 9 --use_vllm true"
SWIFT = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10 --beta 0"
HF = "swift rlhf --rlhf_type grpo --tuner_type full --num_generations 4 --max_steps 10 --beta 0"
ACTOR, CORRECT = "actor_rollout_ref.actor", "algorithm.rollout_correction"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    f"{ACTOR}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
IS_06, GSPO = "algorithm.rollout_is", f"{ACTOR}.policy_loss.loss_mode=gspo"
OF_06 = f"{VERL} {IS_06}=True actor_rollout_ref.rollout.calculate_log_probs=True"
MODE, ON = "vllm_importance_sampling_mode", "vllm_importance_sampling_correction"
MAX, MIN = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"
OWN, LIMIT = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
LEVEL = "importance_sampling_level"
FREE = 1e-9  # no lower bound


def correction(found: Converted) -> tuple[Any, ...]:
    """Name, correction and its bounds, as far as they are read."""
    ours = found.config.algorithm
    bounds = {"none": (), "bypass": (), "truncated": (ours.correction_high,)}
    return (ours.name, ours.correction, *bounds.get(ours.correction, (ours.correction_low, ours.correction_high)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{VERL} {CORRECT}.rollout_is=token", ("grpo", "truncated", 2.0)),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_threshold=3", ("grpo", "truncated", 3.0)),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_threshold=0.4_4.0", ("grpo", "masked", 0.4, 4.0)),
        (f"{VERL} {ACTOR}.tis_imp_ratio_cap=2.5", ("grpo", "truncated", 2.5)),
        (f"{VERL} {CORRECT}.rollout_is=token {ACTOR}.policy_loss.loss_mode=gspo", ("gspo_token", "truncated", 2.0)),
        (f"{VERL} {CORRECT}.bypass_mode=True", ("grpo", "bypass")),
        (f"{VERL} {CORRECT}.bypass_mode=True {CORRECT}.rollout_is=token", ("grpo", "bypass")),
        # bounds of verl 0.9 are those of pi_engine / pi_old, and of 0.7 those of pi_old / pi_engine, as here
        (f"{VERL} {CORRECT}.rollout_rs=seq_mean_k1 {CORRECT}.rollout_rs_threshold=0.5_1.25",
         ("grpo", "rejection", 0.8, 2.0)),
        (f"{VERL} {CORRECT}.rollout_rs=seq_mean_k1 {CORRECT}.rollout_rs_threshold=1.25",
         ("grpo", "rejection", 0.8, 1.25)),
        (f"{VERL} {CORRECT}.rollout_rs=geometric {CORRECT}.rollout_rs_threshold=1.25 "
         f"{CORRECT}.rollout_rs_threshold_lower=0.5", ("grpo", "rejection", 0.5, 1.25)),
        (f"{OF_06} {IS_06}_threshold=3", ("grpo", "truncated", 3.0)),
        (f"{OF_06} {IS_06}_threshold=4 {IS_06}_mode=mask", ("grpo", "masked", 0.25, 4.0)),
        (f"{OF_06} {IS_06}_threshold=4 {IS_06}_threshold_lower=0.5 {IS_06}_mode=mask", ("grpo", "masked", 0.5, 4.0)),
        (f"{OF_06} {IS_06}_threshold=2 {GSPO}", ("gspo_token", "truncated", 2.0)),
        (f"{OF_06} {IS_06}_threshold=1.1 {IS_06}_level=geometric {GSPO}", ("gspo", "truncated", 1.1)),
        (f"{TRL} --{MODE} token_truncate", ("grpo", "truncated", 3.0)),
        (f"{TRL} --{MODE} token_truncate --{MAX} 2", ("grpo", "truncated", 2.0)),
        (f"{TRL} --{MODE} token_truncate --vllm_importance_sampling_cap 2.5", ("grpo", "truncated", 2.5)),
        (f"{TRL} --{MODE} token_mask --{MIN} 0.5 --{MAX} 2", ("grpo", "masked", 0.5, 2.0)),
        (f"{TRL} --{MODE} token_mask --{MAX} 2", ("grpo", "masked", FREE, 2.0)),
        (f"{SWIFT} --{OWN} token_truncate", ("grpo", "truncated", 2.0)),
        (f"{HF} --use_vllm true --vllm_mode colocate --{OWN} token_truncate --{LIMIT} 4", ("grpo", "truncated", 4.0)),
        (f"{HF} --use_vllm true --vllm_mode colocate --{OWN} token_mask --{LIMIT} 4", ("grpo", "masked", FREE, 4.0)),
        (f"{SWIFT} --{OWN} token_truncate --{LEVEL} sequence_token", ("gspo_token", "truncated", 2.0)),
        (f"{SWIFT} --{OWN} sequence_truncate --{LEVEL} sequence", ("gspo", "truncated", 2.0)),
    ],
)  # fmt: skip
def test_a_correction_with_the_same_weights_is_carried_over(text: str, expected: tuple[Any, ...]) -> None:
    found = convert(text, gpus=None if text.startswith(VERL) else 1)
    assert correction(found)[:2] == expected[:2] and correction(found)[2:] == pytest.approx(expected[2:])
    assert not [item for item in found.left if "importance_sampling" in item.name and "bypass" not in text]


def test_the_sequences_that_verl_06_leaves_out_are_told() -> None:
    text, veto = f"{OF_06} {IS_06}_threshold=2", f"{IS_06}_veto_threshold"
    assert [line for line in convert(text).assumed if "leaves out a sequence with a token" in line]
    found = convert(f"{text} {veto}=1e-4")
    assert "leaves out a sequence" in {item.name: item.why for item in found.left}[veto]
    found = convert(f"{text} {veto}=null")
    assert "leaves out a sequence" not in f"{found.assumed} {found.left}"


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        (f"{VERL} {CORRECT}.rollout_is=sequence", f"{CORRECT}.rollout_is", "product of its tokens"),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_batch_normalize=True", f"{CORRECT}.rollout_is",
         "not divided by their mean"),
        (f"{VERL} {CORRECT}.rollout_is=token {ACTOR}.policy_loss.loss_mode=geo_mean", f"{CORRECT}.rollout_is",
         "tokens of a sequence have a weight each there"),
        (f"{VERL} {IS_06}=True {IS_06}_threshold=2", IS_06, "without actor_rollout_ref.rollout.calculate_log_probs"),
        (f"{OF_06} {IS_06}_level=geometric", f"{IS_06}_level", "only measures"),
        (f"{OF_06} {IS_06}=False {IS_06}_threshold=2", f"{IS_06}_threshold", "only measures"),
        (f"{OF_06} {IS_06}_threshold=2 {IS_06}_level=sequence", IS_06, "product of its tokens"),
        (f"{OF_06} {IS_06}_threshold=2 {IS_06}_level=geometric", f"{IS_06}_level", "one in common there"),
        (f"{VERL} {CORRECT}.rollout_is=token actor_rollout_ref.rollout.calculate_log_probs=False",
         f"{CORRECT}.rollout_is", "corrects nothing with"),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_threshold=2.0_3.0", f"{CORRECT}.rollout_is",
         "lie around 1"),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_threshold=1.0_1.0", f"{CORRECT}.rollout_is",
         "lie around 1"),
        (f"{VERL} {CORRECT}.rollout_is=token {CORRECT}.rollout_is_threshold=0.5", f"{CORRECT}.rollout_is",
         "lie around 1"),
        (f"{VERL} {CORRECT}.rollout_rs=token_k1 {CORRECT}.rollout_rs_threshold=2", f"{CORRECT}.rollout_rs",
         "no tokens"),
        (f"{VERL} {CORRECT}.rollout_is_threshold=3", f"{CORRECT}.rollout_is_threshold", "read with rollout_is only"),
        (f"{TRL} --{MODE} sequence_mask", MODE, "product of its tokens"),
        (f"{TRL} --{MODE} token_truncate --{LEVEL} sequence", MODE, "have a weight each there"),
        (f"{TRL} --{MODE} token_truncate --{MIN} 0.5", MODE, "bounded from above"),
        (f"{TRL} --{MODE} token_truncate --{ON} false", MODE, f"read with {ON} only"),
        (f"{TRL} --{MODE} token_truncate --use_vllm false", MODE, "read with use_vllm only"),
        (f"{SWIFT} --{OWN} sequence_mask", OWN, "all tokens of a sequence have its weight there"),
        (f"{SWIFT} --{OWN} sequence_truncate", OWN, "all tokens of a sequence have its weight there"),
        (f"{SWIFT} --{OWN} token_truncate --{LEVEL} sequence", OWN, "have a weight each there"),
        (f"{SWIFT} --{LIMIT} 3", LIMIT, f"read with {OWN} only"),
    ],
)  # fmt: skip
def test_a_correction_with_other_weights_is_left_out_with_the_reason(text: str, name: str, why: str) -> None:
    found = convert(text, gpus=None if text.startswith(VERL) else 1)
    assert found.config.algorithm.correction == "none"
    assert why in {item.name: item.why for item in found.left}[name]


def test_trls_correction_is_told_where_it_is_on_by_default() -> None:
    told = "vllm_importance_sampling_correction is on where vLLM generates, unless it is switched off"
    assert any(line.startswith(told) for line in convert(TRL, gpus=1).assumed)
    for more in (f"--{ON} false", "--use_vllm false", f"--{MODE} token_truncate", f"--{MODE} sequence_mask"):
        assert not any(line.startswith(told) for line in convert(f"{TRL} {more}", gpus=1).assumed), more


def test_negative_sequences_that_the_policy_has_left_are_dropped_as_there() -> None:
    assert convert(f"{TRL} --off_policy_mask_threshold 0.5", gpus=1).config.algorithm.sequence_mask == 0.5
    assert convert(f"{SWIFT} --off_policy_sequence_mask_delta 0.4", gpus=1).config.algorithm.sequence_mask == 0.4


def test_what_a_dropped_sequence_loses_besides_is_told() -> None:
    told = "it drops the KL term of a sequence, too, there"
    given = f"{SWIFT} --off_policy_sequence_mask_delta 0.4"
    assert told in convert(given.replace("--beta 0", "--beta 0.1"), gpus=1).text
    assert told not in convert(given, gpus=1).text


def test_a_rollout_with_a_part_of_an_update_has_that_update_too() -> None:
    found = convert(f"{VERL} data.train_batch_size=80 trainer.save_freq=10")
    assert found.config.checkpoint.interval == 30  # 80 prompts are updates of 32, 32 and 16


def test_verls_rejection_is_told_where_its_mean_is_over_tokens() -> None:
    rejects = f"{VERL} {CORRECT}.rollout_rs=seq_mean_k1 {CORRECT}.rollout_rs_threshold=1.25"
    told = "a dropped sequence is left out of its mean over tokens there"
    assert told in convert(rejects).text
    assert told not in convert(f"{rejects} {ACTOR}.loss_agg_mode=seq-mean-token-mean").text


def test_an_objective_without_a_clip_range_is_refused() -> None:
    for more in ("loss_type=reinforce", "use_policy_gradient=True"):
        with pytest.raises(ValueError, match="with bypass_mode it is another objective, without a clip range"):
            convert(f"{VERL} {CORRECT}.bypass_mode=True {CORRECT}.{more}")


def test_bypass_with_another_loss_tells_what_earlier_versions_train() -> None:
    found = convert(f"{VERL} {CORRECT}.bypass_mode=True {ACTOR}.policy_loss.loss_mode=gspo")
    assert correction(found) == ("gspo", "bypass")
    assert any("up to 0.8 verl does not read loss_mode then" in line for line in found.assumed)


def test_weights_of_the_kl_term_are_told() -> None:
    weighed = convert(f"{SWIFT.replace('--beta 0', '--beta 0.1')} --{OWN} token_truncate", gpus=1)
    assert "its weights count for the KL term, too, there" in weighed.text
    assert "KL term, too" not in convert(f"{SWIFT} --{OWN} token_truncate", gpus=1).text


def test_another_model_as_reference_is_a_teacher() -> None:
    name = "actor_rollout_ref.ref.model.path"
    given = f"{VERL} actor_rollout_ref.model.path=a/b {ACTOR}.use_kl_loss=True +{name}"
    found = convert(f"{given}=c/d")
    assert (found.config.algorithm.teacher, found.config.algorithm.kl_estimator) == ("c/d", "k3")
    assert name in {item.name for item in found.carried} and found.config.algorithm.kl_beta == 0.001
    quadratic = convert(f"{given}=c/d {ACTOR}.kl_loss_type=mse").config.algorithm
    assert (quadratic.teacher, quadratic.kl_estimator) == ("c/d", "k2")
    same = convert(f"{given}=a/b")
    assert name in {item.name for item in same.carried} and not any(name in line for line in same.assumed)
    unread = convert(f"{given.replace('use_kl_loss=True', 'use_kl_loss=False')}=c/d")
    assert not any(name in line for line in unread.assumed) and unread.config.algorithm.teacher is None
    assert {item.name: item.why for item in unread.left}[name] == "there is no KL term, so no reference is read"


def test_quantized_weights_are_told() -> None:
    for text in (SWIFT, HF):
        assert {item.name: item.why for item in convert(f"{text} --quant_bits 4", gpus=1).left}["quant_bits"] == (
            "weights are never quantized here"
        )


def test_verls_defaults_are_written_out_where_nothing_is_given() -> None:
    found = convert(VERL)
    assert found.config.algorithm.dual_clip == 3.0 and "dual_clip: 3.0 # default of verl" in found.text
    assert convert(f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo").config.algorithm.dual_clip == 0.0
    assert "interval: 50 # verl saves nothing (trainer.save_freq -1, its default), not even the last" in found.text
    assert "save_freq -1), not even the last" in convert(f"{VERL} trainer.save_freq=-1").text
    unknown = convert(f"{VERL} trainer.save_freq=$FREQ")
    assert "verl saves nothing" not in unknown.text
    assert "$FREQ is not set in the script" in {item.name: item.why for item in unknown.left}["trainer.save_freq"]
    with pytest.raises(ValueError, match="trainer_mode=separate_async: it generates and trains at the same time"):
        convert(f"{VERL} trainer.v1.trainer_mode=separate_async")
    with pytest.raises(ValueError, match="trainer_mode=colocate_async: completions that an update interrupts go on"):
        convert(f"{VERL} trainer.v1.trainer_mode=colocate_async")
    assert convert(f"{VERL} trainer.v1.trainer_mode=sync").config.batch.num_generations == 8


@pytest.mark.parametrize(
    ("pin", "words", "kind", "high", "line"),
    [
        ("trl==0.23.0", "", "truncated", 2.0, ""),
        ("trl==0.25.1", "--vllm_importance_sampling_cap 3", "truncated", 3.0, ""),
        ("trl>=0.23,<0.26", "--vllm_importance_sampling_correction true", "truncated", 2.0, ""),
        ("trl==0.23.0", "--vllm_importance_sampling_correction false", "none", None, ""),
        ("trl==0.22.0", "", "none", None, ""),
        ("trl==0.24.0", "--importance_sampling_level sequence", "none", None, "with weights of tokens of at most 2: "),
        ("trl==0.26.0", "", "none", None, "with vllm_importance_sampling_mode sequence_mask: "),
        ("trl>=0.23", "", "none", None, "with vllm_importance_sampling_mode sequence_mask: "),
    ],
)
def test_weights_of_tokens_were_bounded_by_2_in_trl_0_23_to_0_25(
    pin: str, words: str, kind: str, high: float | None, line: str
) -> None:
    run = f"trl grpo --num_generations 4 --per_device_train_batch_size 4 --max_steps 9 --use_vllm {words}"
    found = convert(f"# {pin}\n{run}\n", gpus=2)
    assert found.config.algorithm.correction == kind
    assert high is None or found.config.algorithm.correction_high == high
    lines = [text for text in found.assumed if text.startswith("vllm_importance_sampling_correction is on")]
    assert [line in text for text in lines] == ([True] if line else [])
    told = [text for text in found.assumed if text.startswith("defaults are those of TRL 1.9")]
    assert any("weights of tokens of at most 2" in text for text in told) is (pin == "trl>=0.23")
