"""Differences that readers of conversions of TRL's examples and open-r1's recipes found, by argument (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 100 --model_name_or_path a/b"


def of(words: str = "", gpus: int = 1) -> Converted:
    return convert(f"{TRL} {words}", gpus=gpus)


def told(lines: tuple[str, ...], word: str) -> list[str]:
    return [line for line in lines if word in line]


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("--gradient_accumulation_steps 4 --steps_per_generation 8", "1/2 of the mean"),
        ("--gradient_accumulation_steps 4 --generation_batch_size 96 --loss_type cispo --epsilon_high 5", "1/3 of"),
        ("--gradient_accumulation_steps 4 --steps_per_generation 2", "2 times the mean"),
        ("--gradient_accumulation_steps 4", ""),
        ("--gradient_accumulation_steps 4 --steps_per_generation 8 --loss_type grpo", ""),
        ("--gradient_accumulation_steps 4 --steps_per_generation 8 --importance_sampling_level sequence", ""),
    ],
)
def test_an_update_is_divided_by_the_tokens_of_its_rollout(words: str, share: str) -> None:
    """num_items_in_batch of TRL 0.22 to 1.9 is that of the generation batch, which several updates share."""
    lines = told(of(words).differs, "by all tokens of its rollout")
    assert [share in line for line in lines] == ([True] if share else [])


def test_updates_of_a_rollout_have_mixed_completions() -> None:
    assert told(of("--gradient_accumulation_steps 2 --steps_per_generation 4").differs, "TRL shuffles completions")
    assert not told(of("--gradient_accumulation_steps 2").differs, "TRL shuffles completions")


@pytest.mark.parametrize("words", ["--loss_type bnpo", "# trl==0.18.0"])
def test_the_mean_of_bnpo_is_told_also_where_it_is_the_default_of_a_version(words: str) -> None:
    start, found = ("", of(words)) if words.startswith("-") else (words, convert(f"{words}\n{TRL}\n", gpus=1))
    assert found.config.algorithm.aggregation == "token", start
    assert told(found.differs, "loss_type bnpo: the mean is over the tokens of an update here")


def test_a_revision_is_that_of_the_model() -> None:
    assert of("--model_revision v1.0").config.model.path == "a/b@v1.0"
    for words in ("--model_revision main", "", "--model_revision v1 --model_name_or_path ./folder"):
        assert "@" not in str(of(words).config.model.path)


@pytest.mark.parametrize(
    ("words", "estimator"),
    [
        ("--beta 0.1 --use_bias_correction_kl true", "unbiased"),
        ("--use_bias_correction_kl true", None),
        ("--beta 0.1 --use_bias_correction_kl false", None),
        ("--beta 0.1 --use_bias_correction_kl true --importance_sampling_level sequence --loss_type grpo", None),
    ],
)
def test_the_unbiased_estimator_of_the_divergence(words: str, estimator: str | None) -> None:
    found = of(words)
    assert found.config.algorithm.kl_estimator == (estimator or of().config.algorithm.kl_estimator)
    assert any("use_bias_correction_kl" == one.name for one in (*found.carried, *found.left)) is ("--use_bias" in words)


def test_a_mask_of_sequences_compares_with_the_trainer_where_no_engine_generates() -> None:
    word = "without use_vllm TRL compares with the trainer's own old log-probs"
    assert told(of("--off_policy_mask_threshold 0.5").differs, word)
    assert not told(of("--off_policy_mask_threshold 0.5 --use_vllm").differs, word)


@pytest.mark.parametrize(
    ("path", "sees"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", True),
        ("HuggingFaceTB/SmolVLM2-2.2B", True),
        ("OpenGVLab/InternVL3-8B", True),
        ("Qwen/Qwen3-8B", False),
        ("a/evolve-7b", False),
    ],
)
def test_images_are_told(path: str, sees: bool) -> None:
    assert bool(told(of(f"--model_name_or_path {path}").assumed, "reads images")) is sees


def test_a_config_that_only_filters_rows_is_refused() -> None:
    text = (
        "model_name_or_path: a/b\nnum_generations: 8\nlearning_rate: 1e-6\npass_rate_min: 0.2\nmax_prompt_length: 512\n"
    )
    with pytest.raises(ValueError, match="compute_pass_rate"):
        convert(text, name="filter.yaml", gpus=1)


def test_a_project_is_that_of_trackio_and_one_that_is_not_known_is_not_written() -> None:
    assert of("--project mine").config.tracking.project == "mine"
    assert of("--project $NAME").config.tracking == of().config.tracking


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--gradient_accumulation_steps 4 --num_train_epochs 3", True),
        ("--gradient_accumulation_steps 4", True),
        ("--gradient_accumulation_steps 4 --num_train_epochs 1", False),
        ("--num_train_epochs 3", False),
    ],
)
def test_prompts_that_an_epoch_drops_are_told(words: str, notes: bool) -> None:
    """With one prompt in a rollout there are none; max_steps may be those of several epochs."""
    start = TRL.replace("--max_steps 100 ", "") if "epochs" in words else TRL
    found = convert(f"{start} {words}", gpus=1)
    assert bool(told(found.differs, "drops the last prompts where they fill no rollout")) is notes


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--bf16 true --torch_dtype bfloat16", True),
        ("--bf16 false --torch_dtype bfloat16", True),
        ("--bf16 true", False),
        ("--bf16 true --torch_dtype float32", False),
        ("--bf16 true --torch_dtype bfloat16 --deepspeed zero2.json", False),
        ("--bf16 true --torch_dtype bfloat16 --use_peft --lora_r 8", False),
    ],
)
def test_weights_that_are_trained_in_16_bits_are_told(words: str, notes: bool) -> None:
    """torch's AdamW steps on the weights that were loaded."""
    assert bool(told(of(words).assumed, "they are trained in it there")) is notes


def test_gradients_and_log_probs_in_16_bits_are_told() -> None:
    assert told(of("--deepspeed zero2.json").differs, "ZeRO and FSDP reduce and add up gradients")
    assert not told(of().differs, "ZeRO and FSDP reduce and add up gradients")
    assert told(of().differs, "logits and log-probs are in float32 here")
    assert not told(of("--bf16 false").differs, "logits and log-probs are in float32 here")


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("", True),
        ("--scale_rewards batch", True),
        ("--multi_objective_aggregation normalize_then_sum", True),
        ("--scale_rewards none", False),
    ],
)
def test_the_epsilon_beside_the_deviation_is_told(words: str, notes: bool) -> None:
    assert bool(told(of(words).differs, "the deviation of the rewards + 1e-4 there")) is notes


def test_the_head_is_computed_in_float32_in_any_case() -> None:
    (why,) = [one.why for one in of("--cast_lm_head_to_fp32 true").left if one.name == "cast_lm_head_to_fp32"]
    assert why == "trainer and engine compute logits in float32 here in any case"


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("", True),
        ("--dtype float32", True),
        ("--dtype bfloat16", False),
        ("--dtype auto", False),
        ("--bf16 false", False),
        ("--deepspeed zero2.json", False),  # casts the weights
    ],
)
def test_weights_that_autocast_leaves_in_float32_are_told(words: str, notes: bool) -> None:
    assert bool(told(of(words).differs, "products of matrices alone in 16 bits (autocast)")) is notes


@pytest.mark.parametrize(
    ("words", "notes"),
    [("--use_peft true --lora_r 8", True), ("--use_peft true --lora_r 8 --use_vllm true", False), ("", False)],
)
def test_adapters_beside_the_weights_are_told_where_transformers_generates(words: str, notes: bool) -> None:
    assert bool(told(of(words).differs, "sampled with adapters beside the weights")) is notes


def test_tokens_that_end_a_completion_are_told_where_transformers_generates() -> None:
    text = "without use_vllm a completion ends at the tokenizer's end token alone there"
    assert told(of().differs, text) and not told(of("--use_vllm true").differs, text)


@pytest.mark.parametrize(("rows", "notes"), [(None, True), (150, True), (1000, False)])
def test_what_an_epoch_drops_is_told_where_the_steps_go_beyond_one(rows: int | None, notes: bool) -> None:
    """100 updates of two prompts: a rollout has 16 completions."""
    words = "--gradient_accumulation_steps 2"
    found = convert(f"{TRL} {words}", gpus=1, rows=rows)
    assert bool(told(found.differs, "drops the last prompts where they fill no rollout")) is notes


@pytest.mark.parametrize(("epochs", "steps"), [("1", 5), ("0.5", 3), ("1.5", 8), ("0.01", 1), ("2", 10)])
def test_a_part_of_an_epoch_has_the_updates_that_transformers_gives_it(epochs: str, steps: int) -> None:
    """Trainer rounds up: max_steps = ceil(num_train_epochs * num_update_steps_per_epoch)."""
    run = TRL.replace("--max_steps 100", "")
    found = convert(f"{run} --num_train_epochs {epochs}", gpus=1, rows=5)
    assert found.config.run.max_steps == steps


def test_a_limit_of_checkpoints_that_is_not_known_may_be_none() -> None:
    found = convert(f"{TRL} --save_steps 10 --save_total_limit $LIMIT", gpus=1)
    assert told(found.differs, "all are kept in the original unless save_total_limit is a number")
    assert not told(of("--save_steps 10 --save_total_limit 3").differs, "all are kept in the original")


@pytest.mark.parametrize(
    ("pin", "words", "scored"),
    [
        ("", "--use_vllm", "of one up to 0.23, of two in 0.24;"),
        ("trl==0.18.0", "--use_vllm", "of one up to 0.23;"),
        ("trl==0.24.0", "--use_vllm", "log-probs are of two in 0.24;"),
        ("trl==0.25.0", "--use_vllm", ""),
        ("trl==0.18.0", "", ""),
        ("trl==0.18.0", "--use_vllm --model_name_or_path Qwen/Qwen3-8B", ""),
        ("trl==0.18.0", "--use_vllm --model_name_or_path deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "of one up to"),
    ],
)
def test_two_begin_tokens_for_vllm_are_told_up_to_trl_0_24(pin: str, words: str, scored: str) -> None:
    lines = told(convert(f"# {pin}\n{TRL} {words}\n", gpus=2).differs, "hands vLLM rendered chat templates as text")
    assert len(lines) == bool(scored)
    assert all(scored in line for line in lines)
    assert all(("plain text" in line) is (pin != "trl==0.24.0") for line in lines)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--save_safetensors True", "checkpoints have a format of their own here"),
        ("--save_safetensors False", "checkpoints have a format of their own here"),
        ("--gradient_checkpointing_use_reentrant True", "it is not needed here"),
        ("--push_to_hub_token x", "nothing is sent to a hub"),
        ("--include_tokens_per_second True", "it has no counterpart here"),
        ("--fsdp_min_num_params 100", "optimizer.distributed cuts the optimizer"),
        ("--per_gpu_train_batch_size 8", "per_device_train_batch_size is the same"),
        ("--adafactor False", "off"),
    ],
)
def test_arguments_that_end_with_transformers_4_are_known(words: str, why: str) -> None:
    found = of(words)
    name = words.split()[0][2:]
    assert not found.strange
    assert why in {item.name: item.why for item in found.left}[name]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--adafactor", "adafactor: there is only AdamW here"),
        ("--per_gpu_train_batch_size 4", "transformers 4 takes it for per_device_train_batch_size"),
    ],
)
def test_arguments_of_transformers_4_that_train_otherwise_are_refused(words: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of(words)


@pytest.mark.parametrize(
    ("pin", "words", "prompts"),
    [
        ("trl==0.14.0", "--per_device_train_batch_size 4", 4),
        ("trl==0.14.0", "--per_device_train_batch_size 1", 0),
        ("trl==0.14.0", "", 0),
        ("trl>=0.14", "--per_device_train_batch_size 2", 2),
        ("trl>=0.14", "", 0),
        ("trl>=0.15", "--per_device_train_batch_size 2", 0),
    ],
)
def test_log_probs_without_an_attention_mask_are_told_of_trl_0_14(pin: str, words: str, prompts: int) -> None:
    run = "trl grpo --num_generations 2 --max_steps 9 --model_name_or_path a/b"
    lines = told(convert(f"# {pin}\n{run} {words}\n", gpus=2).differs, "without an attention mask")
    assert len(lines) == bool(prompts)
    assert all(f"with {prompts} prompts on a device" in line for line in lines)
