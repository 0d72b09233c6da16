"""Rows that lack a field which a reward function reads are refused before a run, wherever they stand (15 s).

Catches a check of the first row alone, fields that nobody reads and that are missed, and rows without a name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.rows import known_fields, lacking, load_rows
from gspo_hpc.doctor import inputs
from gspo_hpc.launch import checks, preflight

OWN = """
def reads(completion, *, prompt, fields):
    return float(completion == fields["answer"])


def reads_by_kind(completion, *, prompt, fields):
    if fields.get("kind") == "open":
        return 0.5
    return float(completion == fields["answer"])


def reads_none(completion, *, prompt, fields):
    return float(len(completion))


def batched(completions, *, prompt, fields):
    return [float(one == fields["answer"]) for one in completions]
"""


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps({'prompt': 'p'} | row)}\n" for row in rows))
    return str(path)


def made(folder: Path, function: str, *rows: dict[str, Any], **data: Any) -> Config:
    (folder / "own.py").write_text(OWN)
    name = f"{folder}/own.py:{function}" if not function.endswith("match") else function
    return from_dict(
        {
            "data": {"train": write(folder / "train.jsonl", *rows), **data},
            "reward": {"functions": [{"function": name}]},
        }
    )


def findings(config: Config) -> dict[str, str]:
    found = {one.check: f"{one.state} {one.finding}" for one in inputs.findings(config)}
    return {name: found.get(name, "") for name in ("reward functions", "fields of rows", "training data")}


ROWS = [{"answer": "1", "hint": "x"}, {"answer": "2"}, {"hint": "y"}, {"answer": None, "hint": "z"}]


@pytest.mark.parametrize("function", ["reads", "batched", "number_match", "exact_match"])
def test_a_later_row_without_the_field_is_refused_by_its_place(function: str, tmp_path: Path) -> None:
    """The first row was the only one that was looked at; the others cost samples for the whole run."""
    config = made(tmp_path, function, *ROWS)
    with pytest.raises(ValueError, match="train.jsonl:3") as caught:
        checks.check_inputs(config)
    told = str(caught.value)
    assert "'answer'" in told and "train.jsonl:2" not in told, "nobody reads the hint that the second row lacks"
    if not function.endswith("match"):  # those are refused as by `plan`
        assert "; 1 more row lacks it, too" in told, "null is no answer either"
        assert "the row lacks 'answer'" in told
    else:
        (problem,) = preflight.problems(config, [preflight.data])
        assert f"{function} cannot grade {tmp_path}/train.jsonl:3" in problem.text
    found = findings(config)
    assert "train.jsonl:3" in found["fields of rows"] and found["fields of rows"].startswith("fail ")


@pytest.mark.parametrize("function", ["reads_by_kind", "reads_none"])
def test_a_row_that_is_graded_without_the_field_passes(function: str, tmp_path: Path) -> None:
    config = made(tmp_path, function, {"answer": "1"}, {"kind": "open"})
    checks.check_inputs(config)
    assert findings(config)["fields of rows"] == "" and findings(config)["reward functions"].startswith("ok")


def test_rows_to_evaluate_on_need_what_the_function_that_decides_reads(tmp_path: Path) -> None:
    """An evaluation whose rows all lack the answer had been refused by nobody, and graded nothing."""
    unseen = write(tmp_path / "eval.jsonl", {"solution": "1"}, {"solution": "2"})
    config = made(tmp_path, "reads", {"answer": "1"}, eval=unseen)
    with pytest.raises(ValueError, match=r"eval.jsonl:1: the row lacks 'answer', .* 1 more row lacks it, too"):
        checks.check_inputs(config)
    functions = [{"function": f"{tmp_path}/own.py:{name}"} for name in ("reads", "reads_none")]
    given = {"reward": {"functions": functions}, "eval": {"reward": functions[1]["function"]}}
    checks.check_inputs(from_dict({"data": {"train": config.data.train, "eval": unseen}} | given))


def test_few_rows_are_tried_and_each_field_that_is_missing_somewhere_is_missing_in_one(tmp_path: Path) -> None:
    names = [f"field{number}" for number in range(6)]
    rows = [dict.fromkeys(names, "x")] + [
        {name: "x" for at, name in enumerate(names) if not (number >> at) & 1} for number in range(1, 64)
    ]
    path = write(tmp_path / "train.jsonl", *rows)
    read = load_rows(path, from_dict({}).data)
    found = lacking(read, known_fields(read[0]))
    assert [sorted(one.missing) for one in found] == [[name] for name in names]
    assert all(one.alike == 32 for one in found), "half of the rows lack each"
    assert lacking(read[:1], known_fields(read[0])) == []
