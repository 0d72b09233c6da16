"""Checks of the files that a config names: the fields of the data, reward functions, and the model's folder.

Catches a config that is called runnable although `train` refuses it at its first look at these files. Three seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import load
from gspo_hpc.data.counting import fields
from gspo_hpc.launch import checks
from tests.folders import model_folder
from tests.unit.planning.test_planned_only import WHOLE


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": 1}\n\n' * 100)
    (tmp_path / "run.yaml").write_text(json.dumps(WHOLE | {"data": {"train": "rows.jsonl", "prompt_key": "question"}}))
    return "run.yaml"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_rows_without_a_prompt_are_refused_with_the_field_to_take(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys, run)[0] == 3  # the model is not here
    code, told = planned(capsys, run, "data.prompt_key=zzz")
    (broken,) = told["broken"]  # type: ignore[misc]
    assert code == 2 and told["runnable"] is False and broken["rule"] == "data_has_prompts"
    assert broken["message"] == "data.train rows.jsonl has no 'zzz' (data.prompt_key); its rows have: question, answer"
    assert told["fixes"] == [[{"key": "data.prompt_key", "before": "zzz", "value": "question"}]]
    (tmp_path / "misspelt.jsonl").write_text('{"promt": "a", "answer": 1}\n' * 100)
    _, told = planned(capsys, run, "data.train=misspelt.jsonl", "data.prompt_key=prompt")
    assert told["fixes"] == [[{"key": "data.prompt_key", "before": "prompt", "value": "promt"}]], "not the answer"
    (tmp_path / "german.jsonl").write_text('{"frage": "a", "Answer": 1}\n' * 100)
    _, told = planned(capsys, run, "data.train=german.jsonl", "data.prompt_key=zzz")
    assert told["fixes"] == [[{"key": "data.prompt_key", "before": "zzz", "value": "frage"}]], "not the answer"
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a"}\n')
    code, told = planned(capsys, run, "data.eval=held_out.jsonl")
    assert code == 2 and [one["message"].split()[0] for one in told["broken"]] == ["data.eval"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "\n", "[1]\n", "no json\n", '{"question": "a"}\n{"other": "a"}\n'])
def test_what_cannot_be_told_from_the_first_rows_is_left_to_the_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert fields(file) == (("question", "other") if "other" in text else None)
    (tmp_path / "empty").mkdir()
    assert fields(tmp_path / "empty") is None and fields(tmp_path / "none.jsonl") is None
    assert fields(tmp_path) == fields(file), "a folder has the fields of its files"
    assert fields(Path(__file__)) is None


def test_a_reward_function_that_is_not_there_is_noted_and_one_that_cannot_be_called_is_refused(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = planned(capsys, run, "reward.functions=[{function: no/such.py:f}]")
    assert code == 3 and told["absent"] == ["reward.functions[0].function", "model.path"]
    assert any("no/such.py is not there" in note for note in told["not_checked"])  # type: ignore[attr-defined]
    (tmp_path / "own.py").write_text("def mark(completion, *, prompt, fields, scale=1.0):\n    return scale\n")
    code, told = planned(capsys, run, "reward.functions=[{function: own.py:mark, args: {scale: 2}}]")
    assert code == 3 and told["absent"] == ["model.path"]
    assert not any("reward.functions" in note for note in told["not_checked"])  # type: ignore[attr-defined]
    for function, mistake in {
        "own.py:marks": "own.py has no function 'marks' at its top level; nearest: mark",
        "own.py:mark, args: {sale: 2}": "unknown argument 'sale'; nearest: scale",
        "number_match, args: {zz: 1}": "unknown argument 'zz'",
        "own.py": "must be given as path/to/file.py:function",
    }.items():
        code, told = planned(capsys, run, f"reward.functions=[{{function: {function}}}]")
        assert code == 2 and mistake in str(told["errors"])


@pytest.mark.parametrize(
    "function", ["number_match", "exact_match", "regex, args: {pattern: a}", "number_match, args: {answer: label}"]
)
@pytest.mark.parametrize(
    "row", [{}, {"answer": 1}, {"answer": "none"}, {"label": "4"}, {"answer": None, "label": True}]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_first_row_is_graded_in_the_plan_as_in_train(
    run: str, function: str, row: dict[str, object], suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"question": "a", **row}
    if suffix == "jsonl":
        (tmp_path / "own.jsonl").write_text(f"\n{json.dumps(whole)}\n" * 100)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([whole] * 100), tmp_path / "own.parquet")
    words = (run, f"data.train=own.{suffix}", f"reward.functions=[{{function: {function}}}]")
    code, told = planned(capsys, *words)
    try:
        checks.check_inputs(load(words[0], words[1:]))
    except ValueError as refused:
        assert code == 2 and "reward.functions" in str(refused), refused
        (error,) = told["errors"]  # type: ignore[misc]
        assert (
            str(refused) in error
            and f"reward.functions[0].function: {function.split(',')[0]} cannot grade own.{suffix}:" in error
        )
        assert "args: {answer: FIELD} names another field" in error
    else:
        assert code == 3 and told["runnable"] is None and told["absent"] == ["model.path"]


def test_a_model_folder_is_looked_at_as_train_does(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights it is planned with a note; what is there and damaged is refused."""
    model = model_folder(tmp_path / "model")
    shard, other = model / "model-1.safetensors", model / "model-2.safetensors"
    words = (run, "model.path=model", "cluster.gpus_per_node=1")

    def refused_by_train() -> str:
        with pytest.raises(ValueError, match="model.path") as error:
            checks.check_model(load(words[0], words[1:]))
        return str(error.value).splitlines()[0].removeprefix("model.path: ")

    code, told = planned(capsys, *words)
    assert code == 0 and not any("model.path" in line for line in told["not_checked"])  # type: ignore[attr-defined]
    shard.write_bytes(shard.read_bytes()[:-10])
    code, told = planned(capsys, *words)
    assert code == 2 and refused_by_train() in str(told["errors"]) and "is cut off" in str(told["errors"])
    shard.unlink()
    code, told = planned(capsys, *words)
    assert code == 2 and refused_by_train() in str(told["errors"]) and "model-1.safetensors is missing" in str(told)
    other.unlink()
    code, told = planned(capsys, *words)
    note = "model.path model: model-1.safetensors is missing, and 1 more error. A run needs it."
    assert code == 3 and told["runnable"] is None and note in told["not_checked"], told  # type: ignore[operator]
    refused_by_train()
    (model / "tokenizer_config.json").write_text("{}")
    code, told = planned(capsys, *words)
    assert code == 2 and "has no chat template" in str(told["errors"])
    assert planned(capsys, *words, "data.chat_template=false")[0] == 3
    (model / "tokenizer_config.json").write_text("{")
    code, told = planned(capsys, *words)
    assert code == 2 and "tokenizer_config.json is not JSON" in str(told["errors"])
    for file in model.glob("*"):
        if file.name != "config.json":
            file.unlink()
    code, told = planned(capsys, *words)
    assert code == 3 and told["runnable"] is None
    for what in ("there is no model.safetensors", "has none of tokenizer.json"):
        assert any(what in note for note in told["not_checked"])  # type: ignore[attr-defined]
