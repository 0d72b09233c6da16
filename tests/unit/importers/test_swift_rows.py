"""The rows of a run of ms-swift: those that are held out or too long, and how many steps they make."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.tables import load
from gspo_hpc.planning.settings import value_of

MEGATRON = (
    "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --global_batch_size 64 --micro_batch_size 1 "
    "--steps_per_generation 4 --num_generations 8 --tensor_model_parallel_size 4 "
)
SWIFT = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --tuner_type full --per_device_train_batch_size 8 "
    "--gradient_accumulation_steps 1 --num_generations 8 "
)


def steps(found: Converted) -> int | None:
    value = value_of(found.config, "run.max_steps")
    return value if isinstance(value, int) else None


@pytest.mark.parametrize("run", [MEGATRON, SWIFT])
def test_rows_that_are_held_out_are_not_trained_on(run: str) -> None:
    two = f"{run} --num_train_epochs 2 --split_dataset_ratio 0.2"
    assert steps(convert(f"{two} --dataset d.jsonl#5000")) == 1000
    assert steps(convert(f"{two} --dataset d.jsonl", rows=5000)) == 1000
    assert steps(convert(f"{two} --dataset d.jsonl#5000 --val_dataset v.jsonl")) == 1250
    assert steps(convert(f"{two} --dataset d.jsonl#5000 --eval_strategy no")) == 1250
    assert steps(convert(f"{run} --num_train_epochs 2 --dataset d.jsonl#5000")) == 1250
    assert "4000 prompts, the other 1000 of 5000 being held out" in convert(f"{two} --dataset d.jsonl", rows=5000).text


def test_numbers_that_are_no_digits_are_not_counted() -> None:
    """A superscript is a digit for str.isdigit and no number for int: convert ended with a traceback."""
    found = convert(f"{MEGATRON} --num_train_epochs 2 --dataset d.jsonl#\u00b2")
    assert steps(found) is None and found.config.run.max_epochs == 2
    with pytest.raises(ValueError, match="NPROC_PER_NODE=\u00b2: must be a whole number"):
        convert(MEGATRON.replace("NPROC_PER_NODE=8", "NPROC_PER_NODE=\u00b2"))


def test_each_data_set_is_split_on_its_own() -> None:
    found = convert(f"{MEGATRON} --num_train_epochs 8 --split_dataset_ratio 0.5 --dataset a.jsonl#7 b.jsonl#9")
    assert "9 prompts, the other 7 of 16 being held out" in found.text  # 4 of 7 and 5 of 9
    assert "of 16 prompts, ms-swift trains on 9, and data.train_ratio on 8" in found.differs


def test_epochs_go_before_iterations() -> None:
    found = convert(f"{MEGATRON} --num_train_epochs 3 --train_iters 77 --lr_warmup_fraction 0.1")
    assert found.config.run.max_epochs == 3 and "max_steps" not in found.text.partition("#\n")[0]
    left = {item.name: item.why for item in found.left}
    assert left["train_iters"] == "num_train_epochs takes precedence over it"
    assert "once that is known" in left["lr_warmup_fraction"]
    assert steps(convert(f"{MEGATRON} --train_iters 77")) == 77


@pytest.mark.parametrize(("size", "expected"), [(1, 1002), (2, 1000), (4, 1000), (8, 992)])
def test_an_epoch_has_whole_micro_batches_of_all_ranks(size: int, expected: int) -> None:
    """Two ranks of 1,003 prompts, each in micro-batches of so many; eight epochs of eight completions, 64 an update."""
    run = MEGATRON.replace("--micro_batch_size 1", f"--micro_batch_size {size}")
    assert steps(convert(f"{run} --num_train_epochs 8", rows=1003)) == expected


def test_at_least_one_row_is_held_out() -> None:
    text = "swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 4 --split_dataset_ratio 0.01"
    found = convert(f"{text} --gradient_accumulation_steps 1 --num_train_epochs 1", gpus=1, rows=10)
    assert found.config.run.max_steps == 9 and "9 prompts, the other 1 of 10 being held out" in found.text


@pytest.mark.parametrize("run", [MEGATRON, SWIFT])
@pytest.mark.parametrize(
    ("strategy", "overlong"),
    [
        ("", "truncate_left"),
        ("--truncation_strategy left", "truncate_left"),
        ("--truncation_strategy delete", "drop"),
        ("--truncation_strategy None", "truncate_left"),
    ],
)
def test_prompts_that_are_too_long_are_cut_or_dropped_as_there(run: str, strategy: str, overlong: str) -> None:
    assert convert(f"{run} {strategy}").config.data.overlong == overlong


@pytest.mark.parametrize("strategy", ["right", "split"])
def test_strategies_that_grpo_has_not_are_refused_as_there(strategy: str) -> None:
    with pytest.raises(ValueError, match=f"--truncation_strategy {strategy}: must be one of left, delete"):
        convert(f"{SWIFT} --truncation_strategy {strategy}")


def test_only_arguments_of_attention_are_answered_with_its_key() -> None:
    reasons = load("swift").reasons
    told = {name for name, why in reasons.items() if "model.attention_backend" in why}
    assert told == {"attn_impl", "use_flash_attn"} and "model.layers" in reasons["moe_grouped_gemm"]
