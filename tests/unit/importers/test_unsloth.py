"""Arguments that Unsloth's GRPOConfig overrides (unsloth/models/rl.py of August 2026; under 2 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

TEXT = """import unsloth
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig({})
GRPOTrainer(model="m/m", reward_funcs=[f], args=args, train_dataset=ds).train()
"""


def of(arguments: str, gpus: int = 1, text: str = TEXT) -> Converted:
    return convert(text.format(arguments), gpus=gpus)


def told(found: Converted, start: str) -> bool:
    return any(line.startswith(start) and "Unsloth" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("", 10),  # Unsloth's default
        ("warmup_ratio=0.03", 3),
        ("warmup_ratio=0.0", 0),
        ("warmup_steps=7", 7),
        ("warmup_steps=7, warmup_ratio=0.5", 7),
        ("warmup_steps=0", 0),
    ],
)
def test_a_warm_up_that_is_given_counts_and_not_the_default(given: str, steps: int) -> None:
    found = of(f"max_steps=100, {given}")
    assert found.config.optimizer.lr_warmup_steps == steps
    assert told(found, "warmup_steps=0: no warm-up; with transformers 4") is (given == "warmup_steps=0")


@pytest.mark.parametrize("given", ["", ", epsilon_high=0.25", ", epsilon_high=0.28, mask_truncated_completions=True"])
def test_dapo_sets_a_bound_and_a_mask(given: str) -> None:
    found = of(f"loss_type='dapo'{given}")
    assert (found.config.algorithm.clip_high, found.config.rollout.truncated) == (0.28, "mask")
    own = "0.28" in given
    assert told(found, "epsilon_high") is not own and told(found, "mask_truncated_completions") is not own


@pytest.mark.parametrize(
    ("given", "divides"),
    [("", True), (", scale_rewards=True", False), (", scale_rewards=None", True), (", scale_rewards=False", False)],
)
def test_dr_grpo_turns_the_scale_around(given: str, divides: bool) -> None:
    found = of(f"loss_type='dr_grpo'{given}")
    assert found.config.algorithm.normalize_advantage is divides
    assert told(found, "scale_rewards") is (given != ", scale_rewards=False")


@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
def test_other_losses_set_nothing(loss: str) -> None:
    found = of(f"loss_type='{loss}', epsilon_high=0.25, scale_rewards=True")
    assert (found.config.algorithm.clip_high, found.config.rollout.truncated) == (0.25, "train")
    assert found.config.algorithm.normalize_advantage and not told(found, "epsilon_high")


@pytest.mark.parametrize(
    ("size", "steps", "group", "gpus", "made"),
    [(1, 1, 4, 1, 4), (1, 4, 6, 1, 6), (1, 4, 4, 1, 1), (1, 1, 4, 4, 1), (3, 1, 4, 2, 4), (8, 1, 4, 1, 8)],
)
def test_the_batch_becomes_a_group_where_an_update_has_no_whole_ones(
    size: int, steps: int, group: int, gpus: int, made: int
) -> None:
    sizes = f"per_device_train_batch_size={size}, gradient_accumulation_steps={steps}, num_generations={group}"
    batch = of(sizes, gpus).config.batch
    assert (batch.micro_batch_size, batch.global_batch_size) == (made, made * steps * gpus)
    assert told(of(sizes, gpus), "per_device_train_batch_size") is (made != size)


def test_a_batch_that_depends_on_what_is_not_known_is_not_called_known() -> None:
    found = of("per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=own.x")
    assert found.config.batch.micro_batch_size == 8
    why = {item.name: item.why for item in found.left}["per_device_train_batch_size"]
    assert "which depends on num_generations, and is not known: 8 is taken" in why
    assert not any("num_generations (8)" in line for line in found.assumed)
    found = of("per_device_train_batch_size=own.x, gradient_accumulation_steps=1, num_generations=6")
    assert found.config.batch.micro_batch_size == 6 and "per_device_train_batch_size" in {
        one.name for one in found.left
    }


def test_a_rollout_that_is_given_keeps_the_batch() -> None:
    sizes = "per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=8, steps_per_generation=4"
    assert of(sizes).config.batch.micro_batch_size == 2


def test_without_unsloth_nothing_is_overridden() -> None:
    plain = TEXT.replace("import unsloth\n", "")
    given = "loss_type='dapo', epsilon_high=0.25, per_device_train_batch_size=2, gradient_accumulation_steps=1"
    found = of(f"{given}, warmup_ratio=0.03, max_steps=100", 1, plain)
    assert (found.config.algorithm.clip_high, found.config.rollout.truncated) == (0.25, "train")
    assert (found.config.batch.micro_batch_size, found.config.optimizer.lr_warmup_steps) == (2, 3)


def test_a_command_line_of_such_a_file_is_overridden_too() -> None:
    parsed = "import unsloth\nfrom trl import *\n(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
    parsed += "GRPOTrainer(model='m/m', reward_funcs=[f], args=args, train_dataset=ds).train()\n"
    script = f"cat > train.py <<'END'\n{parsed}END\npython train.py --loss_type dapo --num_generations 4 "
    found = convert(f"{script} --warmup_ratio 0.03 --max_steps 100\n", gpus=1)
    assert found.config.algorithm.clip_high == 0.28 and found.config.optimizer.lr_warmup_steps == 3
