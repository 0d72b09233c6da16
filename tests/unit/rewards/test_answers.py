"""Answers that votes are counted by: what completions with equal answers get of their reward function is equal, too.

Takes a second. It would catch an answer that is read elsewhere in a text than where the reward function reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.rewards.builtin import ANSWERS, REGISTRY

WORDS = (
    "12",
    "12.0",
    "1,200",
    "-7",
    "3.5",
    "A",
    "(B)",
    "the answer is C",
    "x2",
    "so",
    "=",
    "<a>",
    "</a>",
    "Yes",
    " ",
    "\n",
)
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("number_match", {}, {"answer": 12}),
    ("number_match", {"position": "first", "tag": "a"}, {"answer": "3.5"}),
    ("number_match", {"position": "any"}, {"answer": 12}),
    ("multiple_choice", {"letters": "ABC"}, {"answer": "B"}),
    ("multiple_choice", {"letters": "ABC", "tag": "a"}, {"answer": 2}),
    ("exact_match", {"ignore_case": True}, {"answer": "yes"}),
    ("exact_match", {"tag": "a"}, {"answer": "12"}),
)
texts = st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join)


@pytest.mark.parametrize(("name", "args", "fields"), CASES)
@given(texts, texts)
def test_equal_answers_get_equal_rewards(
    name: str, args: dict[str, Any], fields: dict[str, Any], one: str, other: str
) -> None:
    answers = [ANSWERS[name](text, **args) for text in (one, other)]
    rewards = [float(REGISTRY[name](text, prompt="", fields=fields, **args)) for text in (one, other)]
    if answers[0] == answers[1]:
        assert rewards[0] == rewards[1], (one, other, answers)
    for answer, reward in zip(answers, rewards, strict=True):
        assert answer is not None or reward == 0.0  # what is right has an answer


def test_answers_that_are_written_in_several_ways() -> None:
    number, mathematics = ANSWERS["number_match"], ANSWERS["math_verify"]
    assert {number(text) for text in ("12", "12.0", "1.2e1", "it is 12.")} == {number("6 or 12")} != {number("13")}
    assert number("none") is None and number("4, 3, 4", position="any") == "3 4"
    assert mathematics(r"so \boxed{\frac{1}{2}} or \boxed{ x + {1} }") == "x+{1}" and mathematics(r"\boxed{1") is None
    halves = (r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac{2}{4}}", "it is 1/2.", "about 0.5, I think", "$0.50$ so done")
    assert {mathematics(text) for text in halves} == {"1/2"}
    assert mathematics("The answer is 1,200.") == mathematics("the answer is 1200") == "1200"
    assert mathematics("I do not know") is None and mathematics("") is None and mathematics("$x=4$. Done.") == "x=4"
    assert mathematics("<a>1 / 2</a> done", tag="a") == "1/2" and mathematics("1/2", tag="a") is None
    assert mathematics("1/0") == "1/0" and mathematics(r"\boxed{1e999999999}") == "1e999999999"
    assert ANSWERS["exact_match"](" ") is None


def test_functions_that_say_which_answer_is_given() -> None:
    assert set(ANSWERS) == {"number_match", "exact_match", "multiple_choice", "math_verify", "reasoning_gym"}
