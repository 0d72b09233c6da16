r"""The grader of mathematics: answers that are equal as expressions, and outcomes that are told apart.

It takes about ten seconds, most of them for worker processes that import sympy. It would catch an answer that cannot be
read, or a slow comparison, that is counted as a wrong answer; a library whose own time limits are signals again; and
a grader that is killed for what the library takes to load.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.data.outcomes import OUTCOMES
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import GroupTable, concatenate
from gspo_hpc.rewards import trial
from gspo_hpc.rewards.builtin import refusal
from gspo_hpc.rewards.calls import loaded
from gspo_hpc.rewards.catalogue import UnparsableGold
from gspo_hpc.rewards.mathematics import math_verify
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.training.step_record import outcome_shares

NONE_I, NONE_F = np.zeros(0, np.int32), np.zeros(0, np.float32)


def grade(completion: str, answer: Any, **args: Any) -> tuple[float, str]:
    value = math_verify(completion, prompt="", fields={"answer": answer}, **args)
    return float(value), value.outcome


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so it is \boxed{\frac12}", "1/2"),
        ("It is 0.5", r"\frac{1}{2}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        ("therefore $x=5$.", 5),
        ("1,234", "1234"),
        ("The answer is 72.", "48 + 24 = 72\n#### 72"),
        (r"It is \boxed{1}. No: it is \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", r"\{1,2\}"),
    ],
)
def test_equal_expressions_are_right(completion: str, answer: Any) -> None:
    assert grade(completion, answer) == (1.0, "right")


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [("The answer is 13.", "wrong"), (r"\boxed{(1,2)}", "wrong"), ("I do not know", "unparsable"), ("", "unparsable")],
)
def test_a_wrong_answer_and_none_are_told_apart(completion: str, outcome: str) -> None:
    assert grade(completion, 12) == (0.0, outcome)


def test_precision_is_an_argument() -> None:
    assert grade("3.14159", r"\pi", precision=4) == (1.0, "right")
    assert grade("3.14159", r"\pi", precision=8) == (0.0, "wrong")


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("<think>It is 3.</think><answer>x + 1</answer>", "right"),
        (r"<answer>$1 + x$</answer> and \boxed{7}", "right"),
        (r"<answer>no: \boxed{x+1}</answer>", "right"),
        ("<answer>x</answer><answer>1+x</answer>", "right"),
        ("<answer>x + 2</answer> x + 1", "wrong"),
        (r"\boxed{x+1}", "unparsable"),
        ("<answer></answer>", "unparsable"),
        ("<answer>x + 1", "unparsable"),
    ],
)
def test_within_a_tag_a_plain_expression_is_read_and_nothing_outside(completion: str, outcome: str) -> None:
    assert grade(completion, "x+1", tag="answer") == (float(outcome == "right"), outcome)


@pytest.mark.parametrize("answer", [None, True, [1], "", "  ", "}{"])
def test_an_answer_of_the_row_that_cannot_be_read_is_an_error(answer: Any) -> None:
    with pytest.raises(UnparsableGold, match="field 'answer' is"):
        grade("12", answer)


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 999), st.integers(-50, 50))
def test_a_fraction_is_right_in_every_form_and_wrong_with_another_numerator(top: int, bottom: int, off: int) -> None:
    gold = f"{top}/{bottom}"
    expected = "right" if off == 0 else "wrong"
    assert grade(rf"it is $\frac{{{top + off}}}{{{bottom}}}$", gold)[1] == expected
    assert grade(rf"\boxed{{{2 * (top + off)}/{2 * bottom}}}", gold)[1] == expected


CASES = {
    "right": (r"\boxed{0.5}", "1/2"),
    "wrong": ("13", "1/2"),
    "unparsable": ("no idea", "1/2"),
    "unparsable_gold": ("13", "}{"),
    "timed_out": (r"\boxed{9^{9^{9^{9}}}}", "1/2"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, RewardResult]:
    """Results of the pool for each case."""
    config = Reward(functions=(RewardFunction(function="math_verify"),), workers=1, timeout=2.0)
    got: dict[str, RewardResult] = {}
    with RewardPool(config) as pool:
        for name, (completion, answer) in CASES.items():
            pool.submit(name, completion, 5, "", {"answer": answer})
        while pool.pending:
            got |= dict(pool.poll(timeout=30.0))
    return got


def test_the_pool_tells_every_outcome(results: dict[str, RewardResult]) -> None:
    assert {name: result.outcomes for name, result in results.items()} == {
        name: {"math_verify": name} for name in CASES
    }
    failures = {name: result.failure for name, result in results.items() if result.failure is not None}
    assert set(failures) == {"unparsable_gold", "timed_out"}
    assert "reward.timeout" in failures["timed_out"] and "UnparsableGold" in failures["unparsable_gold"]


def test_outcomes_reach_the_metrics_through_journal_and_table(results: dict[str, RewardResult]) -> None:
    made = [
        Completion(NONE_I, NONE_F, "", "stop", 0, reward_parts=one.parts, outcomes=one.outcomes, failure=one.failure)
        for one in results.values()
    ]
    other = Completion(NONE_I, NONE_F, "", "stop", 0, reward_parts={"length": 1.0})
    prompt = Prompt(0, NONE_I, "q", {})
    groups = [Group.from_json(Group(0, prompt, tuple(made)).to_json()), Group(1, prompt, (other,) * 5)]
    tables = [GroupTable.from_bytes(GroupTable.of([group], rank).to_bytes()) for rank, group in enumerate(groups)]
    shares = outcome_shares(concatenate(tables))
    expected = {f"reward_outcome/math_verify/{name}": 0.1 * (name in CASES) for name in OUTCOMES}
    assert shares == pytest.approx(expected) and "failed" in OUTCOMES


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'gspo-hpc\[math\]'"):
        loaded(RewardFunction(function="math_verify"))


def test_rows_and_trials_are_checked_before_a_run() -> None:
    assert refusal("math_verify", {}, {"answer": "1/2"}) is None
    assert "no field 'answer'" in (refusal("math_verify", {}, {"result": "1/2"}) or "")
    term = RewardFunction(function="math_verify")
    assert trial.run([term], "", {"answer": "1/2"}) == [trial.Outcome(None)]
    (outcome,) = trial.run([term], "", {"answer": "}{"})
    assert "UnparsableGold" in (outcome.failure or "")
