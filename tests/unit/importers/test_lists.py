"""Every argument of the original run is in exactly one of three lists: carried over, not carried over, unknown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.cli.main import main
from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import Converted, convert

BASES = {
    "swift": "megatron rlhf --rlhf_type grpo --num_generations 4 --global_batch_size 32 --train_iters 10",
    "swift_hf": "swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 4 --max_steps 10",
    "verl": (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
    ),
    "trl": "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 10",
}
VALUES = ["1", "2", "0.5", "true", "False", "none", "null", "flex", "float16", "$X", "$HOME/x.jsonl", "m", "[a,b]"]


def names_of(text: str, source: str) -> list[str]:
    """The names of the arguments in a command line, by a reading of its own."""
    words = shlex.split(text)
    if source == "verl":
        return list(dict.fromkeys(word.partition("=")[0].lstrip("+") for word in words if "=" in word))
    return list(dict.fromkeys(word[2:] for word in words if word.startswith("--")))


def check(found: Converted, names: list[str]) -> None:
    lists = [[item.name for item in part] for part in (found.carried, found.left, found.strange)]
    together = sum(lists, [])
    assert sorted(together) == sorted(names), set(together) ^ set(names)  # all, and none twice
    assert all(item.keys for item in found.carried) and all(item.why for item in found.left)
    for item in found.carried:
        for key in item.keys:
            section, name = key.split(".")
            assert hasattr(getattr(found.config, section), name), key
    for name in together:
        assert name in found.text, name


@pytest.mark.parametrize("gpus", [None, 4])
@pytest.mark.parametrize("more", ["", " --num_processes 4"])
def test_a_file_of_the_launcher_that_is_not_at_hand_is_in_one_list(more: str, gpus: int | None) -> None:
    text = f"accelerate launch --config_file absent.yaml{more} grpo.py --num_generations 8 --max_steps 10"
    found = convert(text, gpus=gpus)
    assert [item.given for item in (*found.carried, *found.left)].count("--config_file absent.yaml") == 1
    assert not any(item.name == "config_file" for item in found.carried)


@given(st.sampled_from(sorted(BASES)), st.data())
@settings(max_examples=80, deadline=None)
def test_the_lists_are_the_arguments_and_do_not_overlap(source: str, data: st.DataObject) -> None:
    text, known = BASES[source], sorted(tables.load(source).known - {"config", "accelerate_config", "config_file"})
    for _ in range(data.draw(st.integers(0, 6))):
        strange = data.draw(st.sampled_from(["zz_strange_one", "yy.odd.name", "new_argument_of_tomorrow"]))
        name = data.draw(st.sampled_from(known)) if data.draw(st.integers(0, 5)) else strange
        value = data.draw(st.sampled_from(VALUES))
        text += f" {name}={shlex.quote(value)}" if source == "verl" else f" --{name} {shlex.quote(value)}"
    try:
        found = convert(text, gpus=data.draw(st.none() | st.just(8)), rows=data.draw(st.none() | st.just(500)))
    except ValueError as refused:
        assert str(refused)
        return
    check(found, names_of(text, source))


@pytest.mark.parametrize("source", sorted(BASES))
def test_each_argument_of_a_table_is_in_one_list(source: str) -> None:
    kept = 0
    for name in sorted(tables.load(source).known - {"config", "accelerate_config", "config_file"}):
        for value in ("2", "true")[: 1 + (sum(map(ord, name)) % 4 == 0)]:  # a second value for some of them
            text = BASES[source] + (f" {name}={value}" if source == "verl" else f" --{name} {value}")
            try:
                found = convert(text, gpus=8, rows=500)
            except ValueError as refused:
                assert name in str(refused) or "num_generations" in str(refused) or "rollout.n" in str(refused)
                continue
            check(found, names_of(text, source))
            kept += 1
    assert kept > len(tables.load(source).known) / 2


def test_words_and_options_of_the_launcher_are_in_the_lists_too() -> None:
    found = convert(
        "accelerate launch --num_processes 4 --main_process_port 1 grpo.py extra --max_steps 5 --lr_typo_x 1"
    )
    carried = {item.name: item.keys for item in found.carried}
    left = {item.name: item.why for item in found.left}
    assert "cluster.gpus_per_node" in carried["num_processes"] and carried["max_steps"] == ("run.max_steps",)
    assert "main_process_port" in left and left["extra"] == "no argument"
    assert [item.name for item in found.strange] == ["lr_typo_x"]


def test_they_are_in_the_text_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{BASES['swift']} --lr $RATE --lora_rank 8 --something_new 3 --beta 0.01"
    (tmp_path / "run.sh").write_text(text)
    assert main(["convert", str(tmp_path / "run.sh"), "--gpus", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {item["name"]: item["keys"] for item in told["carried_over"]}["beta"] == ["algorithm.kl_beta"]
    why = {item["name"]: item["why"] for item in told["not_carried_over"]}
    assert why["lr"].startswith("$RATE is not set in the script") and "adapters" in why["lora_rank"]
    assert told["unknown"] == [{"name": "something_new", "given": "--something_new 3"}]
    names = [item["name"] for part in ("carried_over", "not_carried_over", "unknown") for item in told[part]]
    assert sorted(names) == sorted(names_of(text, "swift"))
    assert told["config"]["algorithm"]["kl_beta"] == 0.01
    assert main(["convert", str(tmp_path / "run.sh"), "--gpus", "8"]) == 0
    shown = capsys.readouterr().out
    assert "--beta 0.01 -> algorithm.kl_beta" in " ".join(shown.replace("#", "").split())
    assert "# Not known as arguments of Megatron-SWIFT:\n#   --something_new 3\n" in shown


@pytest.mark.parametrize(
    ("given", "shuffles"),
    [
        ("--no_shuffle_dataset", False),
        ("--no-shuffle-dataset", False),
        ("--no_shuffle_dataset --shuffle_dataset", True),
        ("--no_shuffle_dataset --shuffle_dataset true", True),
        ("--shuffle_dataset true --no_shuffle_dataset", False),
        ("--shuffle_dataset=$SHUFFLE --no_shuffle_dataset", False),
        ("--shuffle_dataset --no_shuffle_dataset --shuffle_dataset true", True),
        ("--config c.yaml --no_shuffle_dataset", False),
        ("--no_shuffle_dataset --config c.yaml", False),
        ("--no_shuffle_dataset --config c.yaml --shuffle_dataset", True),
        ("--shuffle_dataset --config c.yaml --no_shuffle_dataset", False),
    ],
)
def test_of_a_switch_and_its_opposite_the_later_one_counts(tmp_path: Path, given: str, shuffles: bool) -> None:
    """So it is in transformers' HfArgumentParser; what a file says comes before the whole command."""
    (tmp_path / "c.yaml").write_text("shuffle_dataset: true\n")
    found = convert(f"trl grpo --num_generations 8 --max_steps 9 {given}", gpus=1, folder=tmp_path)
    assert found.config.data.shuffle is shuffles and not found.strange and not found.open
    told = [item.why for item in found.left if item.name == "no_shuffle_dataset"]
    assert len(told) == (" " in given) and all(line.endswith("the later one counts") for line in told)


@pytest.mark.parametrize("before", ["", "--shuffle_dataset true"])
def test_a_switch_that_a_condition_may_turn_off_is_not_known(before: str) -> None:
    script = f"A=({before})\n[ -f x ] && A+=(--no_shuffle_dataset)\n"
    found = convert(f'{script}trl grpo --num_generations 8 --max_steps 9 "${{A[@]}}"', gpus=1, name="run.sh")
    assert any("shuffle_dataset" in given for given in found.open) and not found.strange
    assert "shuffle_dataset" not in {item.name for item in found.carried}


def test_an_opposite_on_the_command_line_counts_before_the_file_of_ms_swift(tmp_path: Path) -> None:
    """ms-swift puts the file's arguments where its name stood, in front."""
    (tmp_path / "c.yaml").write_text("rlhf_type: grpo\nmodel: q\nnum_generations: 8\ngradient_checkpointing: true\n")
    for run in ("c.yaml --no_gradient_checkpointing", "--no_gradient_checkpointing --config c.yaml"):
        found = convert(f"NPROC_PER_NODE=8 swift rlhf {run}", folder=tmp_path, name="run.sh")
        assert found.config.memory.recompute_granularity is None and not found.strange


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"), [(1, 1, 1), (6, 1, 6), (9, 3, 3), (12, 2, 6), (13, 13, 1), (32, 4, 8)]
)
def test_gpus_are_spread_over_as_few_nodes_of_at_most_8_as_hold_them(gpus: int, nodes: int, each: int) -> None:
    cluster = convert("trl grpo --num_generations 8 --max_steps 9", gpus=gpus).config.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, each)


def test_warm_up_of_a_broken_number_of_steps_is_rounded_down() -> None:
    found = convert("trl grpo --num_generations 8 --max_steps 9 --warmup_steps 2.7", gpus=1)
    assert found.config.optimizer.lr_warmup_steps == 2


def test_variables_of_the_template_that_are_not_known_are_told() -> None:
    found = convert("trl grpo --num_generations 8 --max_steps 9 --chat_template_kwargs $KW", gpus=1)
    assert found.open == ("chat_template_kwargs=$KW",)
    assert "$KW is not set in the script" in {item.name: item.why for item in found.left}["chat_template_kwargs"]
