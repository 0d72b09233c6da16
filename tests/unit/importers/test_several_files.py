"""Data of ms-swift that are several files, or some rows of one: sources here (2 s).

It would catch files or numbers that get lost, shares of another file, names that a config refuses, a path that `init`
leaves where it does not lead, and an argument in none of the three lists or in two of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.importers.convert import Converted, convert

RUN = "swift rlhf --rlhf_type grpo --model q --num_generations 8 --max_steps 10 --reward_funcs accuracy"
MEGATRON = "megatron rlhf --rlhf_type grpo --model q --num_generations 8 --train_iters 10 --reward_funcs accuracy"


def sources(found: Converted) -> list[tuple[str, str, Any]]:
    return [(one.name, one.files, one.weight) for one in found.config.data.sources]


def listed(found: Converted, name: str) -> list[str]:
    """The lists in which an argument stands."""
    lists = {"carried": found.carried, "left": found.left, "strange": found.strange}
    return [kind for kind, items in lists.items() if name in {item.name for item in items}]


@pytest.mark.parametrize("run", [RUN, MEGATRON])
def test_several_files_are_sources(run: str) -> None:
    found = convert(f"{run} --dataset data/a.jsonl#1000 org/name:b.parquet data/c.csv#20", gpus=1)
    expected = [("a", "data/a.jsonl#1000", None), ("name-b", "org/name:b.parquet", None), ("c", "data/c.csv#20", None)]
    assert sources(found) == expected and found.config.data.train is None
    assert listed(found, "dataset") == ["carried"]
    assert "data.train" not in found.text and "repeats rows there, and is an error here" in found.text


def test_one_file_is_a_source_only_where_some_of_its_rows_are_wanted() -> None:
    one = convert(f"{RUN} --dataset a.jsonl", gpus=1)
    assert one.config.data.train == "a.jsonl" and one.config.data.sources == ()
    some = convert(f"{RUN} --dataset a.jsonl#50", gpus=1)
    assert sources(some) == [("a", "a.jsonl#50", None)]


def test_chances_are_weights() -> None:
    found = convert(f"{RUN} --dataset a.jsonl b.jsonl --interleave_prob 0.75 0.25", gpus=1)
    assert sources(found) == [("a", "a.jsonl", 0.75), ("b", "b.jsonl", 0.25)]
    assert listed(found, "interleave_prob") == ["carried"]
    assert any("stopping_strategy" in one for one in found.differs), "an epoch has fewer rows there"
    with pytest.raises(ValueError, match="has 1 values for 2 data sets"):
        convert(f"{RUN} --dataset a.jsonl b.jsonl --interleave_prob 0.75", gpus=1)
    with pytest.raises(ValueError, match="sources"):
        convert(f"{RUN} --dataset a.jsonl b.jsonl --interleave_prob 0.75 -1", gpus=1)
    unread = convert(f"{RUN} --dataset a/b c/d --interleave_prob 0.75 0.25", gpus=1)
    assert listed(unread, "interleave_prob") == listed(unread, "dataset") == ["left"]
    unknown = convert(f"{RUN} --dataset a.jsonl b.jsonl --interleave_prob $ONE $TWO", gpus=1)
    assert sources(unknown) == [("a", "a.jsonl", None), ("b", "b.jsonl", None)]
    assert listed(unknown, "interleave_prob") == ["left"]


def test_names_are_those_of_files_and_differ() -> None:
    files = "x/train.jsonl y/train.jsonl 'z/_my data.v2.jsonl' /w/train.jsonl#5 ü.jsonl"
    found = convert(f"{RUN} --dataset {files}", gpus=1)
    assert [one.name for one in found.config.data.sources] == ["train", "train-2", "my-data", "train-3", "data"]
    assert loader.from_dict({"data": {"sources": [one.model_dump() for one in found.config.data.sources]}})


def test_data_sets_of_a_hub_are_none_that_can_be_read() -> None:
    found = convert(f"{RUN} --dataset AI-MO/NuminaMath-TIR#500 a.jsonl", gpus=1)
    assert found.config.data.sources == () and found.config.data.train is None
    assert listed(found, "dataset") == ["left"] and "the rows of all of these" in found.text


def test_a_variable_that_is_not_set_stays_in_its_file() -> None:
    found = convert(f"{RUN} --dataset $DATA/a.jsonl#5 b.jsonl", gpus=1)
    assert sources(found) == [("a", "${DATA}/a.jsonl#5", None), ("b", "b.jsonl", None)]
    assert listed(found, "dataset") == ["left"] and "DATA is not set" in found.text


def test_a_project_finds_the_files_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "theirs"
    place.mkdir()
    for name in "ab":
        rows = "".join(f'{{"prompt": "{name} {number}", "answer": 1}}\n' for number in range(64))
        (place / f"{name}.jsonl").write_text(rows)
    (place / "run.sh").write_text(
        f"{RUN.replace('--model q', '--model Qwen/Qwen3-0.6B')} --dataset a.jsonl#9 b.jsonl\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", str(place / "run.sh")]) == 0
    config = loader.load(tmp_path / "mine" / "config.yaml")
    assert [one.files for one in config.data.sources] == ["../theirs/a.jsonl#9", "../theirs/b.jsonl"]
    assert config.data.train is None
