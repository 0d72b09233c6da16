"""The GRPOConfig in a Python file is read from its syntax tree, and the file is never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

SCRIPT = '''
"""Train."""
import torch
from trl import GRPOConfig, GRPOTrainer

GROUP = 8
NAME = "Qwen2.5-0.5B"
raise SystemExit("this file is not run")

def main():
    args = parse()
    config = GRPOConfig(
        output_dir=f"out/{NAME}-GSPO",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * 2,
        gradient_accumulation_steps=4,
        steps_per_generation=2 * 4,
        learning_rate=args.rate,
        loss_type="grpo",
        max_steps=20,
        bf16=True,
    )
    config.max_completion_length = 1024
    if args.long:
        config.temperature = 0.7
    GRPOTrainer(model="Qwen/Qwen2.5-0.5B", reward_funcs=[accuracy, "format"], args=config).train()
'''


def test_literals_names_and_sums_are_read() -> None:
    found = convert(SCRIPT, gpus=2)
    config = found.config
    assert found.project == "TRL" and config.run.name == "Qwen2.5-0.5B-GSPO"
    assert (config.algorithm.name, config.algorithm.clip_low, config.algorithm.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (config.batch.num_generations, config.batch.micro_batch_size) == (8, 16)
    assert config.batch.global_batch_size == 16 * 2 * 4 and config.batch.steps_per_generation == 2
    assert config.model.path == "Qwen/Qwen2.5-0.5B" and config.rollout.max_response_length == 1024
    left = {item.name: item.why for item in found.left}
    assert left["learning_rate"] == "its value is known only when the script runs; its default is used instead"
    assert "temperature" in left and config.rollout.temperature == 1.0  # set in one of two ways
    assert set(found.open) == {"learning_rate=$(args.rate)", "temperature=$(0.7)"}
    assert left["reward_funcs"].startswith("reward functions differ")


def test_what_a_page_leaves_out_with_dots_is_not_given_and_told() -> None:
    text = "from trl import GRPOConfig, GRPOTrainer\nconfig = GRPOConfig(num_generations=4, max_steps=5, seed=...)\n"
    found = convert(f"{text}GRPOTrainer(model=..., args=config, reward_funcs=[..., score])\n", gpus=2)
    assert found.config.model.path == convert("trl grpo --max_steps 5").config.model.path
    told = {item.name: item.why for item in (*found.carried, *found.left)}
    dots = {name for name, why in told.items() if why.startswith("the example leaves its value out")}
    assert dots == {"seed=...", "model_name_or_path=..."}
    assert told.keys() - dots == {"num_generations", "max_steps", "reward_funcs"}


def test_an_empty_list_is_given() -> None:
    found = convert("from trl import GRPOConfig\nGRPOConfig(max_steps=5, report_to=[])\n", gpus=2)
    assert found.config.tracking.wandb == "disabled"
    assert {item.name for item in (*found.carried, *found.left)} == {"max_steps", "report_to"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from trl import GRPOConfig\na = GRPOConfig(max_steps=1)\nb = GRPOConfig(max_steps=2)\n",
            "makes 2 GRPOConfigs",
        ),
        (
            "from trl import GRPOConfig, TrlParser\nTrlParser((GRPOConfig,)).parse_args_and_config()\n",
            "give that command",
        ),
        (
            "from trl import DPOConfig, DPOTrainer\nDPOTrainer(args=DPOConfig(beta=1))\n",
            "DPOTrainer is another trainer of TRL",
        ),
        (
            "from trl.experimental import AsyncGRPOConfig, AsyncGRPOTrainer\n"
            "AsyncGRPOTrainer(args=AsyncGRPOConfig(max_steps=1))\n",
            "AsyncGRPOTrainer is another trainer of TRL",
        ),
        ("from trl import (\n", "line 1: Python cannot parse this"),
        ("from openrlhf.trainer import PPOTrainer\n", "a run of OpenRLHF"),
        ("from trl import GRPOConfig\nGRPOConfig(output_dir='x')\n", "no argument of TRL that says how to train"),
    ],
)
def test_other_files_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(text)
    assert expected in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_script_of_any_name_is_trls_if_its_file_shows_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = convert("accelerate launch --num_processes 2 train.py --long", folder=tmp_path)
    assert found.config.batch.global_batch_size == 128
    assert {item.name: item.why for item in found.left}["--long"] == "an argument of train.py itself"
    (tmp_path / "learn.py").write_text("from trl import GRPOConfig, TrlParser\nTrlParser((GRPOConfig,)).parse()\n")
    found = convert("python learn.py --num_generations 4 --max_steps 7", folder=tmp_path)
    assert found.project == "TRL" and found.config.run.max_steps == 7


def test_without_its_file_the_arguments_show_it() -> None:
    options = "--num_generations 4 --max_completion_length 64 --per_device_train_batch_size 4 --learning_rate 1e-6"
    assert convert(f"torchrun --nproc_per_node 4 run_it.py {options}").config.batch.global_batch_size == 16
    with pytest.raises(ValueError, match="run_dpo.py is another trainer by its name; --from trl"):
        convert(f"python run_dpo.py {options}")
    assert convert(f"python run_dpo.py {options}", "trl").project == "TRL"
    with pytest.raises(ValueError, match="no run of ms-swift"):
        convert("python train.py --epochs 3 --name x")
