"""Differences that readers of conversions of ms-swift's own examples found, argument by argument (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

RUN = "swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 4 --reward_funcs a"


def told(found: Converted, word: str) -> bool:
    return any(word in line for line in (*found.differs, *found.assumed))


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ("--multi_turn_scheduler tree_scheduler --max_turns 6", True),
        ("--use_gym_env true", True),
        ("--use_gym_env false", False),
        ("", False),
    ],
)
def test_the_server_decides_whether_a_rollout_has_several_turns(options: str, notes: bool) -> None:
    """Its options are no arguments of the run."""
    text = f"CUDA_VISIBLE_DEVICES=1 swift rollout --model m {options} &\n{RUN} --model m --use_vllm true "
    found = convert(f"{text} --vllm_mode server --vllm_server_host 127.0.0.1", gpus=1)
    assert found.config.rollout.mode == "server"
    assert told(found, "of the server: the original goes on for several turns") is notes


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--tuner_type full", True),
        ("--tuner_type full --deepspeed zero2", False),
        ("--tuner_type full --torch_dtype float32", False),
        ("--tuner_type lora", False),
    ],
)
def test_weights_that_are_trained_in_16_bits_are_told(words: str, notes: bool) -> None:
    assert told(convert(f"{RUN} --model m {words}", gpus=1), "weights are trained in bfloat16 there") is notes


@pytest.mark.parametrize(
    ("model", "words", "notes"),
    [
        ("Qwen/Qwen2.5-7B", "", True),
        ("Qwen/Qwen2.5-Math-7B", "", True),
        ("Qwen/Qwen2.5-7B", "--use_chat_template false", False),
        ("Qwen/Qwen2.5-7B-Instruct", "", False),
        ("Qwen/Qwen3-8B", "", False),
    ],
)
def test_prompts_of_base_models_have_another_template_there(model: str, words: str, notes: bool) -> None:
    assert told(convert(f"{RUN} --model {model} {words}", gpus=1), "is a base model: ms-swift gives") is notes


def test_a_system_prompt_that_is_given_is_the_same_for_a_base_model() -> None:
    word = "You are Qwen, created by Alibaba Cloud"
    assert told(convert(f"{RUN} --model Qwen/Qwen2.5-7B", gpus=1), word)
    assert not told(convert(f"{RUN} --model Qwen/Qwen2.5-7B --system Hello", gpus=1), word)


def test_the_bound_of_the_divergence_is_told() -> None:
    word = "a token's estimate of the divergence is 10 at most there"
    assert told(convert(f"{RUN} --model m", gpus=1), word)
    assert not told(convert(f"{RUN} --model m --beta 0", gpus=1), word)


def test_a_server_whose_command_is_not_at_hand_may_have_turns() -> None:
    server = "--use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1"
    assert told(convert(f"{RUN} --model m {server}", gpus=1), "with multi_turn_scheduler or use_gym_env the original")
    assert not told(convert(f"{RUN} --model m --use_vllm true", gpus=1), "with multi_turn_scheduler or use_gym_env")


def test_adapters_of_megatron_share_a_first_matrix() -> None:
    megatron = "megatron rlhf --rlhf_type grpo --num_generations 4 --global_batch_size 16 --reward_funcs a --model m"
    word = "have one first matrix for all of its layers there"
    assert told(convert(f"{megatron} --tuner_type lora", gpus=1), word)
    assert not told(convert(f"{megatron} --tuner_type full", gpus=1), word)
    assert not told(convert(f"{RUN} --model m --tuner_type lora", gpus=1), word)


def test_the_length_of_a_run_with_ray_cuts_what_is_trained_on() -> None:
    run = (
        "rlhf_type: grpo\nmodel: m\nnum_generations: 4\nglobal_batch_size: 16\nmicro_batch_size: 1\nmax_length: 4096\n"
    )
    word = "with Ray it also cuts prompt and completion"
    assert told(convert(f"{run}train:\n  gpus: 4\nrollout:\n  gpus: 4\n", "swift", name="a.yaml"), word)
    assert not told(convert(run, "swift", name="a.yaml", gpus=1), word)


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--deepspeed zero2", True),
        ("--fsdp fsdp2", True),
        ("--deepspeed zero3 --torch_dtype float32 --fp16 false", False),
        ("", False),
    ],
)
def test_gradients_that_zero_sums_in_16_bits_are_told(words: str, notes: bool) -> None:
    found = convert(f"{RUN} --model m {words}", gpus=1)
    assert told(found, "ZeRO and FSDP reduce and add up gradients in the model's 16 bits") is notes


def test_a_server_bounds_prompts_itself() -> None:
    """It does not read the arguments of the trainer, and refuses what is too long for it."""
    words = "--max_length 8192 --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1"
    found = convert(f"{RUN} --model m {words}", gpus=1)
    assert found.config.rollout.max_prompt_length == 8192 and found.config.data.overlong == "error"
    assert "the server bounds prompts by the --max_length of its own command" in found.text
    own = convert(f"{RUN} --model m --max_length 8192", gpus=1)
    assert own.config.data.overlong == "truncate_left" and "which bounds the prompt in ms-swift" in own.text


@pytest.mark.parametrize(
    ("name", "notes"),
    [("AI-ModelScope/clevr_cogen_a_train#1000", True), ("org/data", True), ("rows.jsonl", False), ("$DATA", False)],
)
def test_registered_data_sets_may_change_prompts(name: str, notes: bool) -> None:
    found = convert(f"{RUN} --model m --dataset '{name}'", gpus=1)
    assert told(found, "ms-swift may change the prompts of a data set that it registers") is notes
    assert told(found, "Output the thinking process in <think>") is ("clevr" in name)


@pytest.mark.parametrize(
    ("words", "notes"),
    [("--steps_per_generation 2", True), ("", False), ("--num_train_epochs 2", True)],
)
def test_what_an_epoch_drops_is_told_where_it_changes_the_steps(words: str, notes: bool) -> None:
    run = f"{RUN.replace('batch_size 4', 'batch_size 8')} --model m --num_train_epochs 1 {words}"
    assert told(convert(run, gpus=1), "drops the last prompts where they fill no rollout") is notes


@pytest.mark.parametrize(
    ("words", "notes"),
    [("", True), ("--top_k -1", True), ("--top_k 20", False), ("--use_vllm true --vllm_mode colocate", False)],
)
def test_without_vllm_the_model_says_how_many_tokens_are_sampled_from(words: str, notes: bool) -> None:
    found = convert(f"{RUN} --model m {words}", gpus=1)
    assert found.config.rollout.top_k == (20 if "20" in words else -1)
    assert told(found, "samples from the top_k of the model's generation_config, 50 where it gives none") is notes


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("", True),
        ("--use_vllm true --vllm_mode colocate", False),
        ("--use_vllm true --vllm_mode colocate --vllm_enable_lora true", True),
    ],
)
def test_what_becomes_of_adapters_when_completions_are_sampled(words: str, beside: bool) -> None:
    found = convert(f"{RUN} --model m --tuner_type lora {words}", gpus=1)
    assert told(found, "sampled with adapters beside the weights there") is beside
    assert told(found, "so that base and reference drift a little") is not beside
    whole = convert(f"{RUN} --model m --tuner_type full {words}", gpus=1)
    assert not told(whole, "adapters beside") and not told(whole, "drift a little")


@pytest.mark.parametrize("size", [1, 2])
def test_engines_of_several_gpus_have_the_same_seeds_in_every_rollout(size: int) -> None:
    words = f"--use_vllm true --vllm_mode colocate --vllm_tensor_parallel_size {size}"
    assert told(convert(f"{RUN} --model m {words}", gpus=2), "the same seeds in every rollout there") is (size > 1)


def test_a_long_prompt_is_cut_for_the_engine_alone() -> None:
    text = "--max_length 64: a longer prompt is cut for the engine alone there, and updates have it whole"
    assert told(convert(f"{RUN} --model m --max_length 64", gpus=1), text)
    assert not told(convert(f"{RUN} --model m --max_length 64 --truncation_strategy delete", gpus=1), text)
    assert not told(convert(f"{RUN} --model m", gpus=1), "a longer prompt is cut")


@pytest.mark.parametrize(("words", "notes"), [("", True), ("--scale_rewards none", False)])
def test_the_epsilon_beside_the_deviation_is_told(words: str, notes: bool) -> None:
    assert told(convert(f"{RUN} --model m {words}", gpus=1), "rewards + 1e-4 there, and by") is notes


def test_with_liger_nothing_that_is_cut_off_is_left_out() -> None:
    """Its loss takes all completions: ms-swift reads overlong_filter where it computes its own loss alone."""
    words = "--use_vllm true --overlong_filter true"
    plain, liger = (convert(f"{RUN} {words} --use_liger_kernel {on}") for on in ("false", "true"))
    assert (plain.config.rollout.truncated, liger.config.rollout.truncated) == ("mask", "train")
    assert any("does not apply it" in str(line) for line in liger.dropped)


@pytest.mark.parametrize(("share", "steps", "warmup"), [(0.05, 10, 1), (0.05, 200, 10), (0.0, 10, 0)])
def test_a_warm_up_of_a_part_of_a_step_is_one(share: float, steps: int, warmup: int) -> None:
    """Megatron's schedule counts in samples and does not round: the first of ten updates has rate 0."""
    run = f"{RUN.replace('swift', 'megatron', 1)} --micro_batch_size 1 --global_batch_size 8"
    found = convert(f"{run} --lr_warmup_fraction {share} --train_iters {steps}")
    assert found.config.optimizer.lr_warmup_steps == warmup
