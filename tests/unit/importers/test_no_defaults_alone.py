"""Files at hand that make no GRPOConfig, and runs of which no value is known, become no config of defaults.

Takes three seconds. It would catch a command line of somebody's own that is taken for TRL's because its file is called
grpo or its options are called as TRL's, and a config in which all that decides the training is a default.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

LOOP = "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--beta')\n"
NONE = "there is none in it"
OWN = "python own_grpo.py --learning_rate 2e-6 --beta 0.02 --num_generations 16"
MANY = "python train.py --learning_rate 2e-6 --beta 0.02 --num_generations 16 --max_completion_length 64 --bf16"
SPREAD = """import json
from trl import GRPOConfig, GRPOTrainer

def config(path):
    return GRPOConfig(**json.load(open(path)))
"""
SPREADS = "GRPOConfig(**json.load(open(path))): the arguments of its GRPOConfig are not read there"


def run(command: str, folder: Path, source: str | None = None, **files: str) -> Converted:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return convert(f"{command}\n", source, folder=folder, name="run.sh", gpus=2)


@pytest.mark.parametrize(
    ("command", "text", "why"),
    [
        (OWN, LOOP, NONE),
        (OWN, "", NONE),
        (OWN, "print 'python 2'\n", "line 1: Python cannot parse this"),
        (OWN, SPREAD, SPREADS),
        (OWN, "from trl import GRPOTrainer\nGRPOTrainer(model='m')\n", "it makes a GRPOTrainer, and no GRPOConfig"),
        (OWN, "from trl import SFTTrainer\nSFTTrainer(model='m')\n", "SFTTrainer is another trainer of TRL"),
        (OWN, "from swift.llm import rlhf_main\n", "of ms-swift, commands and YAML are read"),
        (f"accelerate launch --num_processes 2 {MANY.removeprefix('python ')}", LOOP, NONE),
        (MANY, SPREAD, SPREADS),
    ],
)
def test_a_file_at_hand_without_a_grpoconfig_is_refused_as_by_itself(
    tmp_path: Path, command: str, text: str, why: str
) -> None:
    name = next(word for word in command.split() if word.endswith(".py"))
    assert convert(f"{command}\n", folder=tmp_path, name="run.sh", gpus=2).config.batch.num_generations == 16
    with pytest.raises(ValueError) as refused:
        run(command, tmp_path, **{name.replace(".", "__"): text})
    assert str(refused.value).startswith(f"{name}: ") and why in str(refused.value)


def test_from_trl_takes_its_arguments_all_the_same_and_says_so(tmp_path: Path) -> None:
    found = run(OWN, tmp_path, "trl", own_grpo__py=LOOP)
    assert found.config.batch.num_generations == 16
    note = "own_grpo.py makes no GRPOConfig that is read: its arguments are taken for those of one, as --from trl says"
    assert any(note in line for line in found.assumed)


YAML = "num_generations: 4\nlearning_rate: 1e-6\nmax_completion_length: 64\nper_device_train_batch_size: 4\n"


@pytest.mark.parametrize(
    ("text", "taken"), [(f"from mine.train import main\n{LOOP}", True), (f"import mine\n{LOOP}", True), (LOOP, False)]
)
@pytest.mark.parametrize("name", ["main.py", "grpo.py"])
def test_a_yaml_shows_the_run_of_a_file_only_where_that_hands_it_on(
    tmp_path: Path, name: str, text: str, taken: bool
) -> None:
    files = {name.replace(".", "__"): text, "grpo__yaml": YAML}
    if taken:
        found = run(f"python {name} --config grpo.yaml", tmp_path, **files)
        assert found.config.batch.num_generations == 4
        assert any("its YAML shows the run, and what other files of it set" in line for line in found.assumed)
        return
    with pytest.raises(ValueError, match=NONE):
        run(f"python {name} --config grpo.yaml", tmp_path, **files)


LOST = """from trl import GRPOConfig, GRPOTrainer
from mine import ask, look
t = ask()
c = GRPOConfig(output_dir='o', learning_rate=t['lr'], num_generations=t['n'], num_train_epochs=1, {known}
               max_completion_length=t['length'], per_device_train_batch_size=t['batch'], gradient_checkpointing=True)
{doubt}GRPOTrainer(model=t['model'], args=c, train_dataset=t['data'], reward_funcs=t['f']).train()
"""


@pytest.mark.parametrize("doubt", ["", "look(c)\n"])
@pytest.mark.parametrize(
    ("known", "taken"),
    [
        ("", False),
        ("steps_per_generation=1, chat_template_kwargs={'enable_thinking': False},", False),
        ("max_prompt_length=1024, bf16=True,", False),
        ("beta=0.1,", True),
        ("max_steps=50,", True),
        ("gradient_accumulation_steps=8,", True),
        ("temperature=0.7,", True),
    ],
)
def test_a_run_of_which_no_size_rate_or_objective_is_known_is_refused(doubt: str, known: str, taken: bool) -> None:
    text = LOST.format(known=known, doubt=doubt)
    if taken:
        assert convert(text, gpus=1).open
        return
    with pytest.raises(ValueError, match=r"known only when the script runs, and so is all that says how TRL trains: "):
        convert(text, gpus=1)


def test_an_argument_that_is_null_is_no_value_that_is_not_known() -> None:
    text = "# GRPO trainer config\nmodel_name_or_path: m\ndataset_name: d\nlearning_rate: null\nmax_steps: null\n"
    assert not convert(text, name="run.yaml", gpus=1).open


def test_unknown_variables_of_a_script_are_values_that_are_not_known() -> None:
    command = "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --learning_rate $1 --num_generations $2"
    with pytest.raises(ValueError, match="and so is all that says how ms-swift trains"):
        convert(f"{command}\n", name="run.sh", gpus=1)
    assert convert(f"{command} --max_completion_length 64\n", name="run.sh", gpus=1).open
