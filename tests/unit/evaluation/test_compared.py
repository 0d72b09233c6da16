"""Two evaluations, prompt by prompt: the statistics against enumeration, and which prompts are compared (10 s).

Catches a test that is one-sided or approximate, an interval that forgets the pairs or the sign, and prompts that are
compared with others.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.cli.main import main
from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.compare import Comparison, compare
from gspo_hpc.evaluation.scores import difference_interval, mcnemar
from gspo_hpc.evaluation.stored import Stored
from tests.unit.evaluation.kept import evaluation, made_run, row

SHARES = st.integers(-4, 4).map(lambda quarters: quarters / 4)


@pytest.mark.parametrize("total", range(13))
def test_mcnemar_is_the_share_of_splits_that_are_as_uneven(total: int) -> None:
    """Every way in which so many prompts can be split, each as likely as any other."""
    unevenness = [abs(2 * sum(split) - total) for split in itertools.product((0, 1), repeat=total)]
    for second in range(total + 1):
        as_uneven = sum(one >= abs(2 * second - total) for one in unevenness)
        assert mcnemar(total - second, second) == float(Fraction(as_uneven, 2**total))


def test_mcnemar_by_hand_and_far_beyond_a_float() -> None:
    assert mcnemar(0, 0) == mcnemar(5, 5) == mcnemar(4, 5) == 1.0
    assert mcnemar(0, 5) == 2 / 32 and mcnemar(1, 9) == 22 / 1024
    assert mcnemar(20_000, 20_300) == pytest.approx(math.erfc(299 / math.sqrt(40_300) / math.sqrt(2)), rel=1e-3)
    assert mcnemar(0, 5000) == 0.0
    with pytest.raises(ValueError, match="neither number can be negative"):
        mcnemar(3, -1)


@given(st.lists(SHARES, min_size=1, max_size=40))
def test_the_interval_of_swapped_sides_has_the_other_sign(values: list[float]) -> None:
    low, high = difference_interval(values)
    assert -1.0 <= low <= high <= 1.0
    swapped = difference_interval([-one for one in values])
    assert (-swapped[1], -swapped[0]) == pytest.approx((low, high), abs=1e-12)


@given(SHARES, st.integers(1, 300))
def test_equal_differences_have_an_interval_around_them(value: float, count: int) -> None:
    low, high = difference_interval([value] * count)
    assert low <= value <= high and low < high and (high - low) / 2 <= 3.842 / (count + 3.841)
    assert difference_interval([0.0] * count) == pytest.approx(
        (-3.8415 / (count + 3.8415), 3.8415 / (count + 3.8415)), 1e-3
    )


def test_the_interval_is_about_that_of_a_normal_mean() -> None:
    values = [float(one) for one in np.random.default_rng(3).choice([-1, 0, 0, 0, 1, 1], 900)]
    spread = 1.96 * np.std(values) / math.sqrt(len(values))
    assert difference_interval(values) == pytest.approx((np.mean(values) - spread, np.mean(values) + spread), abs=0.006)
    with pytest.raises(ValueError, match="no prompts"):
        difference_interval([])


def test_the_interval_holds_the_true_difference_about_as_often_as_it_says() -> None:
    """400 sets of 60 prompts, of which 30 % are right for one side alone."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        low, high = difference_interval(rng.choice([-1.0, 0.0, 1.0], 60, p=[0.1, 0.7, 0.2]).tolist())
        held += low <= 0.1 <= high
    assert 0.91 <= held / 400 <= 0.98


ROWS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.lists(st.booleans(), min_size=4, max_size=4)), min_size=1, max_size=12
)


@given(ROWS)
def test_swapped_sides_flip_every_sign(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    folder = tmp_path_factory.mktemp("sides")
    first = evaluation(folder / "a", *(row(n, one, four[:2]) for n, (one, _, four) in enumerate(rows)))
    back = list(reversed(list(enumerate(rows))))
    second = evaluation(folder / "b", *(row(n, two, four[2:]) for n, (_, two, four) in back))
    there, again = compare(first, second), compare(second, first)
    for name in ("accuracy", "average"):
        one, two = getattr(there.whole, name), getattr(again.whole, name)
        assert one.difference == pytest.approx(one.second - one.first) and two.difference == -one.difference
        assert (two.first, two.second) == (one.second, one.first)
        assert (-two.high, -two.low) == pytest.approx((one.low, one.high), abs=1e-12)
    assert (again.only_first, again.only_second) == (there.only_second, there.only_first)
    assert again.p_value == there.p_value
    same = compare(first, first)
    assert same.whole.accuracy.difference == same.whole.average.difference == 0.0 and same.p_value == 1.0
    assert same.whole.accuracy.low < 0.0 < same.whole.accuracy.high and same.only_first == same.only_second == 0


def test_a_pair_is_a_prompt_and_not_a_line(tmp_path: Path) -> None:
    """The second has the prompts in another order, one that the first has not, and lacks two."""
    first = evaluation(tmp_path / "a", *(row(n, n % 2 == 0) for n in range(6)))
    others = [row(n, n in (1, 2, 9)) for n in range(9, 1, -1)][-4:] + [row(1, True), row(9, True), row(8, False)]
    found = compare(first, evaluation(tmp_path / "b", *others))
    assert (found.whole.prompts, len(first.prompts), len(others)) == (5, 6, 7)
    assert (found.whole.accuracy.first, found.whole.accuracy.second) == (2 / 5, 2 / 5)
    assert (found.only_first, found.only_second) == (1, 1) and found.whole.average is None
    told = found.to_json()
    assert (told["first"]["left_out"], told["second"]["left_out"]) == (1, 2)


def test_equal_prompts_are_paired_in_their_order_and_other_fields_make_another_prompt(tmp_path: Path) -> None:
    one = [row(1, True), row(1, False), row(1, True, fields={"answer": 2}), row(5, True)]
    found = compare(
        evaluation(tmp_path / "a", *one), evaluation(tmp_path / "b", row(1, True), row(1, True), row(1, True))
    )
    assert found.whole.prompts == 2 and (found.only_first, found.only_second) == (0, 1)


def other(number: int, right: bool, **more: object) -> dict[str, object]:
    """A row as a model with another chat template is asked about it."""
    return row(number, right, prompt=f"<user>which number is {number}?</user>", **more)


def test_over_two_chat_templates_prompts_are_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(tmp_path / "a.jsonl", *(row(n, n < 2) for n in range(6)))
    evaluation(tmp_path / "b.jsonl", *(other(n, n < 4) for n in (5, 3, 2, 1)))
    words = ["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(words) == 0
    assert "4 prompts in common, by their rows of the data: the texts that the models saw differ" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["by"], told["prompts"], told["first"]["left_out"]) == ("row", 4, 2)
    assert (told["accuracy"]["first"], told["accuracy"]["second"]) == (1 / 4, 3 / 4)


@pytest.mark.parametrize("odd", [other(9, True), other(2, True, fields={"answer": 7}), other(2, True, row=1)])
def test_rows_of_other_data_are_not_compared(odd: dict[str, object], tmp_path: Path) -> None:
    """One row that the other side has not, or has with other fields, is enough to show that."""
    first = evaluation(tmp_path / "a.jsonl", *(row(n, True) for n in range(4)))
    second = evaluation(tmp_path / "b.jsonl", other(0, True), other(1, True), odd)
    with pytest.raises(ValueError, match="have no prompt in common"):
        compare(first, second)


def test_without_a_prompt_in_common_it_is_an_error_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("a.jsonl", 1), ("b.jsonl", 2)):
        evaluation(tmp_path / name, row(number, True))
    assert main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "have no prompt in common" in line and str(tmp_path / "b.jsonl") in line


def ungraded(number: int) -> dict[str, Any]:
    """A row for whose answers the function that decides failed."""
    failed = {"reward_parts": {}, "graded": False, "right": False, "reward": 0.0, "failure": "judge: no answer"}
    found = row(number, False, [False, False])
    return found | {"greedy": found["greedy"] | failed, "samples": [one | failed for one in found["samples"]]}


def test_a_side_of_which_nothing_was_graded_has_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its zero was compared: the other side came out better, with a p-value of 1e-18."""
    evaluation(tmp_path / "a.jsonl", *(ungraded(n) for n in range(6)))
    evaluation(tmp_path / "b.jsonl", *(row(n, n < 3, [n < 3, True]) for n in range(6)))
    words = ["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["accuracy", "not", "graded", "0.5000"] in lines and ["avg@2", "not", "graded", "0.7500"] in lines
    assert "first: 6 greedy answers not graded: judge: no answer" in printed and "McNemar" not in printed
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for name, second in (("accuracy", 0.5), ("avg", 0.75)):
        assert told[name] == {"first": None, "second": second, "difference": None, "low": None, "high": None}
    assert told["mcnemar"] == {"only_first": None, "only_second": None, "p_value": None}
    assert (told["first"]["failure"], told["second"]["failure"]) == ("judge: no answer", None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with evaluations of steps 0 and 10."""
    made = made_run(tmp_path / "run")
    stored.write_into(made, 0, [row(n, n < 2, [n < 2, n < 4], step=0) for n in range(10)])
    stored.write_into(made, 10, [row(n, n < 8, [n < 8, n < 6], step=10) for n in range(10)])
    return made.path


def test_two_steps_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", str(run), str(run), "--steps", "0", "10"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0][2:] == ["step", "0,", "10", "prompts", "with", "2", "samples"]
    assert ["accuracy", "0.2000", "0.8000", "+0.6000", "+0.3000", "to", "+0.9000"] in lines
    assert next(line for line in lines if line[0] == "avg@2")[1:4] == ["0.3000", "0.7000", "+0.4000"]
    assert "0 of the first, 6 of the second; McNemar's exact test: p = 0.03125" in printed
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"]["difference"] == pytest.approx(0.6) and told["mcnemar"]["p_value"] == 2 / 64
    assert told["first"]["step"] == 0 and told["second"]["file"] == str(run / "evaluations" / "000010.jsonl")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN", "RUN"], "both are RUN/evaluations/000010.jsonl: give two evaluations, or two steps"),
        (["RUN", "RUN", "--steps", "0", "9"], "RUN has no evaluation of step 9; nearest: 10; it has: 0, 10"),
        (["RUN", "RUN/evaluations/000000.jsonl", "--steps", "0", "0"], "is a file, with one evaluation"),
        (["RUN", "RUNN"], "RUNN: no such run directory or file of an evaluation; nearest: RUN"),
        (["RUN", "RUN/evaluations"], "RUN/evaluations: not a run directory (it has no run.json)"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["compare", *(word.replace("RUN", str(run)) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told.replace("RUN", str(run)) in line


def test_other_graders_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = evaluation(tmp_path / "other.jsonl", *(row(n, True, decides="exact_match") for n in range(10)))
    assert main(["compare", str(run), str(other.path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "number_match decided in the first and exact_match in the second" in line


def test_different_numbers_of_samples_are_compared_by_their_average(tmp_path: Path) -> None:
    draw = random.Random(2)
    sides: list[Stored] = []
    for name, count in (("a", 2), ("b", 5)):
        rows = [row(n, False, [draw.random() < 0.5 for _ in range(count)]) for n in range(8)]
        sides.append(evaluation(tmp_path / name, *rows))
    found: Comparison = compare(*sides)
    assert found.whole.average is not None
    for side, share in zip(sides, (found.whole.average.first, found.whole.average.second), strict=True):
        assert share == pytest.approx(np.mean([each.right for one in side.prompts for each in one.samples]))
