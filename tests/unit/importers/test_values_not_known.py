"""Arguments whose value is known only when the script runs: what stands for it never becomes a setting (20 s)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.scope import is_unset

# A run of each project, and the sign before its arguments and the one between a name and a value.
RUNS = {
    "swift": ("NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model q --num_generations 8", "--", " "),
    "swift_hf": ("NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --num_generations 8", "--", " "),
    "trl": ("accelerate launch --num_processes 8 grpo.py --model_name_or_path q --num_generations 8", "--", " "),
    "verl": (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=q "
        "actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 trainer.nnodes=1",
        "",
        "=",
    ),
}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _settings(project: str, name: str) -> list[str]:
    """Return the lines of settings in which the unknown value of an argument stands, but those to be written out."""
    run, sign, between = RUNS[project]
    try:
        text = convert(f'{run} {sign}{name}{between}"$(f x)"', name="run.sh").text
    except ValueError as error:
        assert not str(error).endswith("its default is used instead")
        return []
    kept = [text for text in _texts(yaml.safe_load(text)) if is_unset(text) or "$(" in text]
    lines = [line for line in text.splitlines() if not line.startswith("#") and any(item in line for item in kept)]
    return [line for line in lines if not line.endswith("; write it out")] + ["hidden"] * (len(kept) > len(lines))


@pytest.mark.parametrize("project", RUNS)
def test_a_value_that_is_not_known_is_no_setting(project: str) -> None:
    found = {name: _settings(project, name) for name in sorted(tables.load(project).read)}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("project", ["swift", "swift_hf"])
def test_a_system_prompt_that_is_not_known_is_told_and_left_out(project: str) -> None:
    found = convert(f'{RUNS[project][0]} --system "$(f x)"', name="run.sh")
    assert found.config.data.system_prompt is None
    assert any(line.startswith("--system $(f") and line.endswith("default is used instead") for line in found.assumed)


@pytest.mark.parametrize("groups", ["", "colocate_groups: [[train, rollout]]\n"])
def test_gpus_alone_do_not_say_how_to_train(groups: str) -> None:
    text = f"use_ray: true\nrlhf_type: grpo\n{groups}train:\n  gpus: 4\nrollout:\n  gpus: 4\n"
    with pytest.raises(ValueError, match="so there is nothing to convert"):
        convert(text, name="run.yaml")
    assert "from a file of" in convert(text + "model: q\ndataset: [d.jsonl]\n", name="run.yaml").text


def test_words_on_a_number_of_gpus_are_true() -> None:
    run = RUNS["swift_hf"][0].replace("NPROC_PER_NODE=8", "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE={}")
    found = convert(run.format("$(f x)"), name="run.sh")
    assert found.config.cluster.gpus_per_node == 4
    assert [line for line in found.assumed if line.startswith("NPROC") and line.endswith("; it is left out")]
    found = convert("export NPROC_PER_NODE=$NPROC_PER_NODE\n" + run.format("$NPROC_PER_NODE"), name="run.sh")
    assert [line for line in found.assumed if "$NPROC_PER_NODE is not set in the script" in line]
    with pytest.raises(ValueError) as told:
        convert(run.format("8").replace("grpo", "$KIND"), name="run.sh")
    assert not str(told.value).endswith("its default is used instead")
