"""Checks of the files that a config names: the fields of the data, and reward functions.

Catches a config that is called runnable although `train` refuses it at its first look at these files. A second.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.data.counting import fields
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
    assert planned(capsys, run)[0] == 0
    code, told = planned(capsys, run, "data.prompt_key=zzz")
    (broken,) = told["broken"]  # type: ignore[misc]
    assert code == 2 and told["runnable"] is False and broken["rule"] == "data_has_prompts"
    assert broken["message"] == "data.train rows.jsonl has no 'zzz' (data.prompt_key); its rows have: question, answer"
    assert told["fixes"] == [[{"key": "data.prompt_key", "before": "zzz", "value": "question"}]]
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a"}\n')
    code, told = planned(capsys, run, "data.eval=held_out.jsonl")
    assert code == 2 and [one["message"].split()[0] for one in told["broken"]] == ["data.eval"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "\n", "[1]\n", "no json\n", '{"question": "a"}\n{"other": "a"}\n'])
def test_what_cannot_be_told_from_the_first_rows_is_left_to_the_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert fields(file) == (("question", "other") if "other" in text else None)
    assert fields(tmp_path) is None and fields(tmp_path / "none.jsonl") is None
    assert fields(Path(__file__)) is None


def test_a_reward_function_that_is_not_there_is_noted_and_one_that_cannot_be_called_is_refused(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = planned(capsys, run, "reward.functions=[{function: no/such.py:f}]")
    assert code == 0 and "reward.functions[0]: no/such.py is not there. A run needs the file." in told["not_checked"]  # type: ignore[operator]
    (tmp_path / "own.py").write_text("def mark(completion, *, prompt, fields, scale=1.0):\n    return scale\n")
    code, told = planned(capsys, run, "reward.functions=[{function: own.py:mark, args: {scale: 2}}]")
    assert code == 0 and not any("reward.functions" in note for note in told["not_checked"])  # type: ignore[attr-defined]
    for function, mistake in {
        "own.py:marks": "own.py has no function 'marks' at its top level; nearest: mark",
        "own.py:mark, args: {sale: 2}": "unknown argument 'sale'; nearest: scale",
        "number_match, args: {zz: 1}": "unknown argument 'zz'",
        "own.py": "must be given as path/to/file.py:function",
    }.items():
        code, told = planned(capsys, run, f"reward.functions=[{{function: {function}}}]")
        assert code == 2 and mistake in str(told["errors"])
