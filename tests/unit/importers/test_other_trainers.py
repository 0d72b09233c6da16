"""Runs of other trainers of TRL, verl and ms-swift are refused with the sign that told, those of GRPO converted (2 s).

Would catch a YAML of SFT, DPO, KTO, RLOO or plain training arguments that becomes a config of GRPO, a refusal that
names nothing, and a run of GRPO that is refused. The converters were tuned on `TUNED` and on half of the files of TRL
1.9, ms-swift 4.5.2, verl 0.9, verl-recipe, open-r1 and alignment-handbook. `JUDGED` was not run before that: of its 48
cases one was refused without its name (`deepspeed --module`), and for one a refusal had not been expected (dr_grpo).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.texts import trl_kinds
from tests.unit.importers.other_trainers import JUDGED, TUNED

CASES = [(project, *case) for cases in (TUNED, JUDGED) for project, given in cases.items() for case in given]


@pytest.mark.parametrize(("project", "name", "text", "told"), CASES)
def test_a_run_is_one_of_grpo_or_refused_with_the_sign(
    project: str, name: str, text: str, told: str | None, tmp_path: Path
) -> None:
    if told is None:
        found = convert(text, folder=tmp_path, name=name)
        assert project in (found.project, found.project.replace("Megatron-SWIFT", "ms-swift"))
        assert found.config.algorithm.name in ("grpo", "gspo")
        return
    with pytest.raises(ValueError, match=told if "?" in told else re.escape(told)) as refused:
        convert(text, folder=tmp_path, name=name)
    assert len(str(refused.value).splitlines()) <= 2


PLAIN = "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1.0e-6\nmax_steps: 10\n"
GROUPS = f"{PLAIN}num_generations: 8\n"


def refusal(text: str, source: str | None = "trl", **more: str) -> str:
    with pytest.raises(ValueError) as refused:
        convert(text, source, name=more.get("name", ""), folder=Path(more.get("folder", "")))
    return str(refused.value)


# -- what --from trl goes before


@pytest.mark.parametrize(
    ("text", "name"),
    [(PLAIN, ""), (PLAIN, "sft.yaml"), (GROUPS, "rloo.yaml"), (f"{PLAIN}beta: 0.1\nmax_prompt_length: 512\n", "")],
)
def test_from_trl_goes_before_names_and_before_the_lack_of_a_sign(text: str, name: str) -> None:
    assert "--from trl" in refusal(text, None, name=name)
    found = convert(text, "trl", name=name)
    assert found.config.optimizer.lr == 1e-6
    assert any("as --from trl says" in line for line in found.assumed) is ("num_generations" not in text)


@pytest.mark.parametrize(
    "own", ["rloo_k: 2", "packing: true", "desirable_weight: 1.0", "loss_type: sigmoid", "max_length: 512"]
)
def test_from_trl_does_not_go_before_an_argument_of_another_trainer_alone(own: str) -> None:
    assert refusal(f"{PLAIN}{own}\n") == refusal(f"{PLAIN}{own}\n", None)
    assert f"{own.partition(':')[0]}" in refusal(f"{PLAIN}{own}\n")


def test_arguments_of_peoples_own_scripts_do_not_go_before_those_of_grpo() -> None:
    found = convert(f"{GROUPS}max_seq_length: 2048\npacking: false\n", name="grpo.yaml")
    assert [item.name for item in found.strange] == ["max_seq_length", "packing"]
    assert "rloo_k" in refusal(f"{GROUPS}rloo_k: 4\n", None, name="grpo.yaml")


# -- names


def test_what_rloo_has_too_is_told_unless_a_name_says_grpo() -> None:
    told = "num_generations: RLOO has the same arguments; they are taken for those of GRPO"
    assert told in convert(GROUPS).assumed
    assert told not in convert(GROUPS, name="gspo.yaml").assumed
    assert told not in convert(f"{GROUPS}run_name: Qwen2.5-GRPO\n").assumed
    assert told not in convert(f"{GROUPS}scale_rewards: false\n").assumed


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("config.yaml", "recipes/m/rloo", "its folder rloo names TRL's RLOO"),
        ("config.yaml", "recipes/m/sdpo", "its folder sdpo names TRL's self-distillation"),
        ("async_grpo.yaml", "x", "its file async_grpo.yaml names TRL's asynchronous GRPO"),
        ("online-dpo.yaml", "grpo", None),
        ("config.yaml", "recipes/m/sft", None),  # which samples nothing
        ("config.yaml", "my-rloo-and-more", None),  # no folder of recipes
        ("dpo_then_grpo.yaml", "rloo", None),
    ],
)
def test_a_name_decides_only_where_the_trainer_has_the_same_arguments(
    name: str, folder: str, expected: str | None
) -> None:
    if expected is None:
        assert convert(GROUPS, name=name, folder=Path(folder)).project == "TRL"
    else:
        assert expected in refusal(GROUPS, None, name=name, folder=folder)


def test_a_file_named_grpo_without_a_sign_is_converted_and_told() -> None:
    assert "as its file grpo.yaml says" in " ".join(convert(PLAIN, name="grpo.yaml").assumed)


# -- scripts at hand


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from trl import DPOConfig as GRPOConfig, DPOTrainer\nDPOTrainer(args=GRPOConfig(beta=0.1))", "DPOConfig"),
        ("from transformers import TrainingArguments as GRPOConfig\nGRPOConfig(max_steps=3)", "TrainingArguments"),
        ("import trl\nclass GRPOConfig(trl.SFTConfig): ...\nGRPOConfig(max_steps=3)", "SFTConfig"),
        ("from trl import GRPOConfig, RLOOTrainer\nRLOOTrainer(args=GRPOConfig(max_steps=3))", "RLOOTrainer"),
        ("from trl import *\na = GRPOConfig(max_steps=3)\nSFTTrainer(args=SFTConfig(max_steps=2))", "SFTTrainer"),
        ("from trl import GRPOConfig, GRPOTrainer as T\nT(args=GRPOConfig(max_steps=3))", None),
        ("from trl import *\nclass Mine(GRPOTrainer): ...\nMine(args=GRPOConfig(max_steps=3))\nSFTTrainer()", None),
        ("import trl\nclass GRPOConfig(trl.GRPOConfig): ...\nGRPOConfig(max_steps=3)", None),
    ],
)
def test_a_class_of_another_trainer_is_seen_whatever_it_is_called(text: str, told: str | None, tmp_path: Path) -> None:
    """Names of GRPO's that stood for another class made a config of GRPO."""
    if told is None:
        assert convert(text, folder=tmp_path, name="train.py").config.run.max_steps == 3
        return
    with pytest.raises(ValueError, match=told):
        convert(text, folder=tmp_path, name="train.py")


@pytest.mark.parametrize("source", [None, "trl"])
def test_a_script_at_hand_that_trains_with_another_trainer_is_refused_by_its_class(
    tmp_path: Path, source: str | None
) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import ModelConfig, RLOOConfig, RLOOTrainer, ScriptArguments, TrlParser\n"
        "s, t, m = TrlParser((ScriptArguments, RLOOConfig, ModelConfig)).parse_args_and_config()\n"
        "RLOOTrainer(model=m.model_name_or_path, args=t).train()\n"
    )
    command = "accelerate launch train.py --model_name_or_path m --num_generations 8 --learning_rate 1e-6 --bf16"
    with pytest.raises(ValueError, match=r"^train\.py: RLOOTrainer is another trainer of TRL"):
        convert(command, source, folder=tmp_path, name="run.sh")


def test_the_yaml_that_a_script_reads_tells_which_trainer_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{PLAIN}packing: true\n")
    with pytest.raises(ValueError, match=r"^train\.py: packing belongs to TRL's SFT"):
        convert("accelerate launch train.py --config run.yaml", folder=tmp_path, name="run.sh")
    with pytest.raises(ValueError, match="packing belongs to TRL's SFT"):
        convert("accelerate launch train.py --config run.yaml", "trl", folder=tmp_path, name="run.sh")


# -- the tables


def test_no_argument_of_grpo_is_taken_for_one_of_another_trainer_alone() -> None:
    known = tables.load("trl").known
    for name, trainer in trl_kinds.TRAINERS.items():
        assert not trainer.own & known, name
    assert trl_kinds.signs(known) == trl_kinds.signs([*known, "packing"]) <= known


# -- ms-swift on Ray


@pytest.mark.parametrize("rollout", [{}, {"rollout": {"gpus": 4, "vllm_tensor_parallel_size": 2}}])
@pytest.mark.parametrize("shared", [(), ("model", "dataset"), ("rlhf_type",)])
def test_a_nested_yaml_of_ms_swift_is_recognised_and_means_the_same_as_with_from(
    rollout: dict[str, Any], shared: tuple[str, ...]
) -> None:
    train = {"rlhf_type": "grpo", "model": "m", "dataset": "d", "gpus": 4, "num_generations": 8, "lr": 2e-6}
    text = json.dumps({**{name: train.pop(name) for name in shared}, "train": train, **rollout})
    found = convert(text, name="run.yaml")
    assert found == convert(text, "megatron-swift", name="run.yaml")
    gpus = 8 if rollout else 4  # of a node: those of the engines are beside the trainer's
    assert (found.config.optimizer.lr, found.config.model.path, found.config.cluster.gpus_per_node) == (2e-6, "m", gpus)
    assert found.project == "Megatron-SWIFT" and not found.strange


def test_only_the_last_part_of_a_folder_names_the_run() -> None:
    """Folders around it are of a project, or of a person: grpo/sft-run is a run of SFT."""
    with pytest.raises(ValueError, match="output_dir /home/grpo/sft-run/ names TRL's SFT"):
        trl_kinds.check({"learning_rate": 1e-6, "output_dir": "/home/grpo/sft-run/"})
    assert trl_kinds.check({"learning_rate": 1e-6, "output_dir": "/home/sft/grpo-run"})
