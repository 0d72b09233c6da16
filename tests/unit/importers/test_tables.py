"""The tables of other projects' arguments: one line an argument, and nothing else to add one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gspo_hpc
from gspo_hpc.config import loader
from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import convert
from tests.examples import example

PACKAGE = Path(gspo_hpc.__file__).parent
PROJECTS = ("swift", "verl", "trl")
RUNS = {
    "swift": ("megatron rlhf --rlhf_type grpo --num_generations 4 --tensor_model_parallel_size 2 --lr 0.5", " --{} {}"),
    "verl": ("algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 "
             "actor_rollout_ref.rollout.n=8", " {}={}"),
    "trl": ("trl grpo --num_generations 8 --per_device_train_batch_size 8", " --{} {}"),
}  # fmt: skip
CHOICES = {"model.attention_backend": "flash"}  # keys of ours that take one of a few words


@pytest.mark.parametrize("project", PROJECTS)
def test_every_line_of_a_table_is_a_key_of_ours_a_sentence_or_code(project: str) -> None:
    text = (PACKAGE / "importers" / "arguments" / f"{project}.yaml").read_text()
    names = [line.split(":")[0].strip('"') for line in text.splitlines() if line and not line.startswith("#")]
    assert len(names) == len(set(names)) and set(names) == set(yaml.safe_load(text))
    table = tables.load(project)  # refuses any other value
    assert table.copied and table.reasons and all(name in table.known for name in table.renamed.values())
    for key, default in table.copied.values():
        section, last = key.split(".")
        loader.from_dict({section: {} if default is None else {last: default}})


@pytest.mark.parametrize("project", PROJECTS)
def test_copied_arguments_arrive_at_their_key(project: str) -> None:
    base, word = RUNS[project]
    for name, (key, default) in tables.load(project).copied.items():
        kind = tables.kind_of(key)
        given = CHOICES.get(key, {bool: not tables.default_of(key), int: 2, float: 0.25, str: "text"}[kind])
        found = convert(base + word.format(name, str(given).lower()), gpus=8, rows=100)
        section, last = key.split(".")
        assert getattr(getattr(found.config, section), last) == given, (name, default)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a: optimizer.lrr", "a: optimizer.lrr is no key of the config"),
        ("a: nonsense", "a: 'nonsense' is no key of the config and no sentence"),
        ("a: {renamed: b}", "is no key of the config and no sentence"),
        ("a: {key: optimizer.lr}", "is no key of the config and no sentence"),
    ],
)
def test_a_mistake_in_a_table_is_named(line: str, expected: str, tmp_path: Path) -> None:
    done = _converted(tmp_path, line, "megatron rlhf --rlhf_type grpo --train_iters 5")
    assert done.returncode != 0 and expected in done.stderr


def test_adding_an_argument_takes_the_line_that_the_example_shows(tmp_path: Path) -> None:
    text = example("A converter's argument")
    assert len(text.splitlines()) < 60
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    added, expected, reason = (block for kind, block in blocks if kind == "yaml")
    (script,) = (block for kind, block in blocks if kind == "bash")
    (command,) = (block for kind, block in blocks if kind == "console")
    assert command == "$ gspo-hpc convert run.sh --out mine.yaml\n"
    before = convert(script)  # the package as it is does not know the argument
    assert any("--logprob_batch_size 4" in line for line in before.dropped)
    done = _converted(tmp_path, added, script)
    assert done.returncode == 0, done.stderr
    assert expected in (tmp_path / "mine.yaml").read_text() and "logprob_batch_size" not in done.stdout
    (tmp_path / "mine.yaml").unlink()
    done = _converted(tmp_path, added + reason, script.strip() + " --logprob_cache 1")
    assert "--logprob_cache 1: log-probabilities are computed once here" in done.stdout


def _converted(folder: Path, line: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run the example's command with a copy of the package that has `line` in a table."""
    copy = folder / "copy" / "gspo_hpc"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "importers" / "arguments" / "swift.yaml").open("a") as file:
        file.write(line.strip() + "\n")
    (folder / "run.sh").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "gspo_hpc", "convert", "run.sh", "--out", "mine.yaml"],
        env=os.environ | {"PYTHONPATH": str(copy.parent)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
