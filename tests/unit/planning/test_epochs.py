"""The length of a run in passes over the data, and the share of it that is trained on. A second.

Catches steps that are counted from other prompts than those that are trained on, and a split that changes by itself.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.cli.main import main
from gspo_hpc.config.derived import trained_rows
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Data
from gspo_hpc.data.counting import count_rows
from gspo_hpc.data.prompts import split
from gspo_hpc.data.rows import load_rows
from gspo_hpc.launch.checks import resolved
from gspo_hpc.planning.plan import make_plan, max_steps
from gspo_hpc.planning.quantities import with_steps

SIZES: dict[str, Any] = {"num_generations": 8, "micro_batch_size": 2, "global_batch_size": 96, "num_iterations": 2}


def written(path: Path, rows: int) -> Path:
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(rows)))
    return path


def test_the_example_of_1320_steps_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, config = written(tmp_path / "rows.jsonl", 8000), tmp_path / "run.yaml"
    config.write_text(json.dumps({"batch": SIZES, "cluster": {"gpus_per_node": 6}, "data": {"train": str(rows)}}))
    words = ["plan", str(config), "data.train_ratio=0.99", "run.max_epochs=1", "--json"]
    assert main(words) == 3
    told = json.loads(capsys.readouterr().out)
    found = told["quantities"]
    assert (found["num_rows"], found["steps_per_epoch"], found["max_steps"]) == (7920, 1320, 1320)
    assert found["gradient_accumulation_steps"] == 8 and found["num_epochs"] == 1
    assert not [key for key in told["missing"] if "epochs" in key]


@given(
    st.integers(1, 10_000),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.333]),
    st.sampled_from([0.1, 0.5, 1, 2, 3.7]),
    st.sampled_from([(8, 1, 1, 1), (8, 8, 6, 2), (4, 2, 3, 4), (16, 1, 8, 3)]),
    st.integers(1, 3),
)
def test_steps_of_epochs(
    rows: int, ratio: float, epochs: float, cut: tuple[int, int, int, int], iterations: int
) -> None:
    """One pass makes the steps of the formula for the prompts that are left, and passes add up."""
    group, size, dp, steps = cut
    batch = {"num_generations": group, "global_batch_size": size * dp * steps, "num_iterations": iterations}
    raw = {"batch": batch, "run": {"max_epochs": epochs}, "data": {"train_ratio": ratio}}
    left = trained_rows(rows, Data(train_ratio=ratio))
    assert left == math.floor(rows * Fraction(str(ratio)))
    found = with_steps(from_dict(raw), rows).run
    whole = Fraction(left * group * iterations, size * dp * steps) * Fraction(str(epochs))
    assert found.max_steps == max(1, math.floor(whole)) and found.max_epochs is None
    if epochs == 1 and whole >= 1:
        assert found.max_steps == max_steps(left, group, size, dp, steps, iterations)


def test_a_run_is_made_of_steps(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", 200)
    raw = {"run": {"max_epochs": 2}, "batch": SIZES, "data": {"train": str(rows)}}
    assert resolved(from_dict(raw)).run.max_steps == 200 * 8 * 2 * 2 // 96
    given_steps = from_dict(raw | {"run": {"max_steps": 3}})
    assert resolved(given_steps) is given_steps
    missing = from_dict(raw | {"data": {"train": str(tmp_path / "none.jsonl")}})
    with pytest.raises(ValueError, match=r"data\.train: .*none\.jsonl is not there"):
        resolved(missing)


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        ({"run": {"max_epochs": 1, "max_steps": 3}}, "run_length_given_once"),
        ({"data": {"eval": "e.jsonl", "train_ratio": 0.9}}, "evaluation_prompts_given_once"),
        ({"data": {"train_ratio": 0.01}}, "train_ratio_leaves_prompts"),
        ({"data": {"eval": "e.jsonl"}, "run": {"max_epochs": 0.5}}, None),
        ({"data": {"train_ratio": 0.5}, "run": {"max_steps": 5}}, None),
    ],
)
def test_what_excludes_each_other(raw: dict[str, Any], rule: str | None) -> None:
    assert [item.rule for item in make_plan(from_dict(raw), rows=50).broken] == ([rule] if rule else [])


@given(st.integers(1, 60), st.sampled_from([0.01, 0.5, 0.75, 0.9, 1.0]), st.integers(0, 3))
def test_the_split_keeps_every_row_once(rows: int, ratio: float, seed: int) -> None:
    data = Data(train_ratio=ratio)
    given_rows: list[Any] = list(range(rows))
    train, held_out = split(given_rows, data, seed)
    assert sorted([*train, *held_out]) == given_rows and len(train) == trained_rows(rows, data)
    assert (train, held_out) == split(given_rows, data, seed) and train == sorted(train)


def test_other_seeds_hold_out_other_rows() -> None:
    every: list[Any] = list(range(1000))
    held_out = [tuple(split(every, Data(train_ratio=0.9), seed)[1]) for seed in range(5)]
    assert len(set(held_out)) == 5
    assert held_out[0] != tuple(range(900, 1000)), "a file is often sorted: its end is no fair sample"


def test_rows_are_counted_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert count_rows(path) == len(load_rows(path, Data())) == 2
    assert count_rows(path, most_bytes=5) is None and count_rows(tmp_path / "no.jsonl") is None
    assert count_rows(None) is None
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), tmp_path / "rows.parquet")
    assert count_rows(tmp_path / "rows.parquet") == 3
    (tmp_path / "bad.parquet").write_text("no")
    assert count_rows(tmp_path / "bad.parquet") is None


def test_what_evaluates_is_one_of_the_rewards() -> None:
    """Another name has no mark: every answer would count as wrong, and nobody would be told."""
    functions = [{"function": "number_match"}, {"function": "length", "args": {"longest": 10}}]
    for name, rules in (("number_match", []), ("length", []), (None, []), ("exact", ["evaluation_reward_is_given"])):
        plan = make_plan(from_dict({"reward": {"functions": functions}, "eval": {"reward": name}}))
        assert [item.rule for item in plan.broken] == rules
    (broken,) = plan.broken
    assert broken.message == "eval.reward (exact) must be one of reward.functions: number_match, length"
    assert make_plan(from_dict({"eval": {"reward": "exact"}})).valid  # no rewards are given yet


@pytest.mark.parametrize(("iterations", "steps", "rest"), [(1, 10, 2), (2, 10, 2), (3, 10, 10), (2, 16, 0), (1, 16, 0)])
def test_a_run_that_ends_within_a_rollout_says_so(iterations: int, steps: int, rest: int) -> None:
    """A rollout has four updates in each iteration."""
    batch = {"global_batch_size": 8, "num_generations": 4, "steps_per_generation": 4, "num_iterations": iterations}
    notes = make_plan(from_dict({"batch": batch, "run": {"max_steps": steps}})).notes
    (told, *_) = [text for text in notes if text.startswith("max_steps (")] or [""]
    assert (
        told.startswith(f"max_steps ({steps}) ends the run after {rest} of the {4 * iterations} updates")
        if rest
        else not told
    )
