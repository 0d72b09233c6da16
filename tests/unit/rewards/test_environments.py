"""Environments: what they may answer, which of them a config may name, and their processes (10 s).

It would catch an answer that is taken although it is none, a state that the journal gives back as another, a mistake
that shows only when ranks have started, and an environment that hangs, exits or raises and costs more than a turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import checks, preflight
from gspo_hpc.rewards.environments import registry
from gspo_hpc.rewards.environments.protocol import MOST_STATE, plain, turn_of
from gspo_hpc.rewards.environments.tasks import Calculator, GuessNumber
from gspo_hpc.rewards.environments.turns import asked, turn_pool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.runs import snapshot

FILE = '''
import os
import time


class Echo:
    """Says what it was told."""

    def __init__(self, first, *, loud=False):
        self.first, self.loud = first, loud

    def reset(self, fields, seed):
        return {"said": [self.first], "seed": seed, "question": fields["question"]}

    def step(self, state, message):
        if message == "hang":
            time.sleep(60)
        if message == "exit":
            os._exit(3)
        if message == "raise":
            raise RuntimeError("no idea")
        if message == "set":
            return {"reply": "", "state": {1, 2}}
        said = [*state["said"], message]
        return {"reply": " ".join(said), "reward": 0.25, "state": {**state, "said": said}, "over": message == "end"}


class Silent:
    """Has no reset."""

    def step(self, state, message):
        return {"reward": 1 if state == {} else 0}


class Nothing:
    """Answers nobody."""
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def config(*words: str) -> Config:
    return loader.load(None, [*words], run_code=True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "step returned NoneType, not a dict"),
        ({"reply": "a", "done": True}, "a dict with 'done'; it may have reply, reward, over, state"),
        ({"reply": 3}, "a reply that is int"),
        ({"reward": float("nan"), "over": True}, "the reward nan"),
        ({"reward": True, "over": True}, "the reward True"),
        ({"reply": "a", "over": 1}, "over=1"),
        ({"reply": "a", "state": {"a": {1}}}, "not plain JSON"),
        ({"reply": "a", "state": {1: "a"}}, "another one when it is read from JSON"),
        ({"reply": "a", "state": ("a",)}, "another one when it is read from JSON"),
        ({"reply": "a", "state": "a" * MOST_STATE}, "1,048,578 characters"),
    ],
)
def test_what_is_no_answer_is_refused(answer: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        turn_of(answer, {})
    assert said in str(refused.value)


def test_an_answer() -> None:
    turn = turn_of({"reply": "more", "reward": 1}, {"a": [1, None, 0.5]})
    assert (turn.state, turn.reply, turn.reward, turn.over) == ({"a": [1, None, 0.5]}, "more", 1.0, False)
    assert turn_of({}, {}).over and turn_of({"reply": "x", "over": True}, {}).reply == ""
    state = {"a": 1}
    assert plain(state) == state and plain(state) is not state


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("environment.name=gues_number",), "there is no such environment; nearest: guess_number"),
        (
            ("environment.name=guess_number", "environment.args={top: 3}"),
            "unexpected keyword argument 'top'; it takes: ",
        ),
        (("environment.name=own.py:Ecko",), "has no class 'Ecko' at its top level; nearest: Echo"),
        (("environment.name=own.py:Echo",), "missing a required argument: 'first'"),
        (("environment.name=own.py:Nothing",), "has no method step(self, state, message)"),
        (("environment.name=own.py",), "must be given as path/to/file.py:Class"),
        (("environment.name=other.py:Echo",), "other.py is not there"),
        (("reward.functions=[{function: environment}]",), "there is no environment whose reward it could be"),
    ],
)
def test_mistakes_are_told_before_anything_starts(file: Path, words: tuple[str, ...], said: str) -> None:
    (problem,) = preflight.environments(config(*words))
    assert said in str(problem)


def test_a_file_of_ones_own_goes_with_a_job_and_belongs_to_the_run(file: Path) -> None:
    given = config("environment.name=own.py:Echo", "environment.args={first: a}")
    registry.check(given.environment)
    assert snapshot.files(given)["own.py:Echo"] == "environment" and "own.py" in snapshot.fingerprints(given)


def test_an_environment_is_tried_before_ranks_start(file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "question": "b"}))
    words = ("data.train=rows.jsonl", "reward.functions=[{function: environment}]", "environment.name=own.py:Echo")
    checks.check_inputs(config(*words, "environment.args={first: a}"))
    file.write_text(FILE.replace('fields["question"]', "fields.question"))
    with pytest.raises(
        ValueError, match="own.py:Echo raised AttributeError: 'dict' object has no attribute 'question'"
    ):
        checks.check_inputs(config(*words, "environment.args={first: a}"))


def test_processes_answer_and_what_goes_wrong_costs_a_turn(file: Path) -> None:
    given = config(
        "environment.name=own.py:Echo", "environment.args={first: a}", "environment.timeout=3", "environment.workers=2"
    )
    row = {"question": "why"}
    begun = {"said": ["a"], "seed": 7, "question": "why"}
    texts = ["b", "end", "raise", "exit", "set", "hang"]
    with turn_pool(given, 1) as pool:
        for text in texts:
            pool.submit(text, text, 1, "", asked(row, 7, None))
        found: dict[str, RewardResult] = {}
        while pool.pending:
            found |= dict(pool.poll(timeout=None))
        turn = found["b"].turn
        assert turn is not None and (turn.reply, turn.over, found["b"].value) == ("a b", False, 0.25)
        assert turn.state == begun | {"said": ["a", "b"]}
        pool.submit("again", "c", 1, "", asked(row, 7, turn.state))
        ((_, later),) = pool.poll(timeout=None)
    assert later.turn is not None and later.turn.reply == "a b c"
    assert found["end"].turn is not None and found["end"].turn.over
    failures = {text: found[text].failure or "" for text in texts}
    assert "raised RuntimeError: no idea" in failures["raise"] and "exit code 3" in failures["exit"]
    assert "the state is not plain JSON" in failures["set"] and "no answer within 3 s" in failures["hang"]
    assert all(found[text].turn is None for text in ("raise", "exit", "set", "hang"))


def test_an_environment_without_reset_begins_with_nothing(file: Path) -> None:
    with turn_pool(config("environment.name=own.py:Silent", "environment.workers=1"), 1) as pool:
        pool.submit("a", "a", 1, "", asked({}, 7, None))
        ((_, result),) = pool.poll(timeout=None)
    assert result.value == 1.0 and result.turn is not None and result.turn.over


def test_guesses() -> None:
    game = GuessNumber(1, 10, hint=0.5)
    state = game.reset({}, 13)
    assert state == {"number": 4, "paid": 0.0}
    assert game.step(state, "no idea") == {"reply": "Say a number from 1 to 10."}
    low = game.step(state, "perhaps 3, or 1")
    assert low["reply"] == "higher" and low["reward"] == pytest.approx(0.25)
    high = game.step(low["state"], "5")
    assert high["reply"] == "lower" and high["reward"] + low["reward"] == pytest.approx(0.5 * (1 - 1 / 6))
    right = game.step(high["state"], "4")
    assert right["over"] and right["reward"] + high["reward"] + low["reward"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="low must be below high"):
        GuessNumber(3, 3)


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ("47 * 83", "3901"),
        ("47 × 83 = 12,345.", "3901"),  # the model's own result does not count
        ("I ask for 1,200 + 3. And 2 + 2?", "1203"),
        ("(2+3)*4=?", "20"),
        ("1/0", "Error: division by zero"),
        ("1. 47*83", "Error: this is no arithmetic expression"),
        (f"1{'-' * 998}1", "Error: this is no arithmetic expression"),
    ],
)
def test_a_message_with_a_calculation_is_computed(message: str, value: str) -> None:
    game = Calculator()
    found = game.step(game.reset({"answer": 7}, 1), message)
    assert (found["reply"], found.get("over", False)) == (value, False)


@pytest.mark.parametrize(
    ("message", "reward"),
    [("3901", 1.0), ("It is 3,901.", 1.0), ("3901 or 5", 0.0), ("-3901", 0.0), ("none", 0.0), ("", 0.0)],
)
def test_a_message_without_one_is_the_answer(message: str, reward: float) -> None:
    game = Calculator("product")
    assert game.step(game.reset({"product": "3901"}, 1), message) == {"reward": reward, "over": True}


def test_the_hint_is_paid_once_and_is_part_of_the_reward() -> None:
    game = Calculator(hint=0.3)
    state = game.reset({"answer": 12}, 1)
    wrong = game.step(state, "3 + 4")
    assert wrong["reward"] == 0.0
    right = game.step(wrong["state"], "3 * 4")
    assert right["reward"] == pytest.approx(0.3)
    again = game.step(right["state"], "6 + 6")
    assert again["reward"] == 0.0
    assert game.step(again["state"], "12")["reward"] == pytest.approx(0.7)
    assert game.step(again["state"], "13")["reward"] == 0.0
    with pytest.raises(ValueError, match="no_such"):
        Calculator("no_such").reset({"answer": 12}, 1)


@pytest.mark.parametrize("text", ["(" * 200_000, "1+" * 100_000, "9 " * 100_000, "." * 200_000 + "1+1"])
def test_a_long_message_takes_no_time_beyond_its_length(text: str) -> None:
    game = Calculator()
    assert set(game.step(game.reset({"answer": 1}, 1), text)) <= {"reply", "reward", "over", "state"}
