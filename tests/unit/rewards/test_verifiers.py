"""Environments of the package `verifiers` behind the Python that they are installed in (5 s, with the real one 60 s).

A package of the same form stands in its place, so that what a turn, a replay and a failure become is shown without it.
With GSPO_HPC_VERIFIERS, a Python with verifiers, sophistry-bench-sprint and staros-stardata, the real ones are asked,
as `bash tools/lanes.sh verifiers` does. It would catch a conversation that a new process leads elsewhere, and errors
that end more than a turn; and conversations that are mixed up, or kept for ever.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Data
from gspo_hpc.data.rows import load_rows
from gspo_hpc.launch import preflight
from gspo_hpc.rewards.environments import verifiers, verifiers_side
from gspo_hpc.rewards.environments.turns import asked, turn_pool
from gspo_hpc.rewards.environments.verifiers import Verifiers

PACKAGE = {
    "__init__.py": '''
import random

__version__ = "0.1.14"


class Rows(list):
    pass


class Rubric:
    """Gives a conversation its share of all that its group said; with `funcs`, groups alone are scored."""

    def __init__(self, funcs=(), rubrics=()):
        self.funcs, self.rubrics = funcs, rubrics

    def _is_group_func(self, func):
        return func == "of a group"

    async def score_group(self, states):
        words = [sum(one["role"] == "assistant" for one in state["completion"]) for state in states]
        for state, count in zip(states, words):
            state["reward"] = count / sum(words)


class Environment:
    """Echoes what it is told, until it is told to stop."""

    rollouts = open = 0

    def __init__(self, mood="calm"):
        self.mood = mood
        self.rubric = Rubric(rubrics=[Rubric(), Rubric(["of a group"])] if mood == "group" else ())

    async def rollout(self, input, client, model, sampling_args):
        state = {"completion": []}
        while True:
            messages = [*input["prompt"], *state["completion"]]
            response = await client.get_response(prompt=messages, model=model, sampling_args=sampling_args)
            said = response.message.content
            state["completion"].append({"role": "assistant", "content": said})
            if said == "fail":
                return {**state, "error": "it fell over"}
            if said == "stop":
                return state
            state["completion"].append({"role": "user", "content": f"{said}, go on"})

    def get_dataset(self, n=-1):
        rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "answer": str(i), "example_id": i, "info": None}
                for i in range(3)]
        if self.mood == "plain":
            rows = [{**one, "prompt": one["prompt"][0]["content"]} for one in rows]
        return rows[:n] if n > 0 else rows

    async def run_rollout(self, row, client, model, sampling_args, state_columns=None):
        print("noise")
        Environment.rollouts += 1
        Environment.open += 1
        try:
            return await self.lead(row, client, model, sampling_args, Environment.rollouts)
        finally:
            Environment.open -= 1

    async def lead(self, row, client, model, sampling_args, number):
        messages, reward = list(row["prompt"]), 0.0
        while True:
            response = await client.get_response(prompt=messages, model=model, sampling_args=sampling_args,
                                                 tools=["a"] if self.mood == "tools" else None)
            said = response.message.content
            if said == "raise":
                raise RuntimeError("no idea")
            if said == "exit":
                import os
                os._exit(3)
            if said == "fail":
                return {"reward": 0.0, "error": "it fell over"}
            reward += said == row["answer"]
            if said == "stop":
                return {"reward": reward}
            mood = random.random() if self.mood == "random" else self.mood
            role = "system" if self.mood == "bossy" else "tool" if said == "odd" else "user"
            told = {"repeat": messages[-1]["content"], "count": f"rollout {number}", "open": f"{Environment.open} open"}
            reply = told.get(said, f"{said}, {mood}")
            messages = [*messages, {"role": "assistant", "content": said}, {"role": role, "content": reply}]


def load_environment(name, **arguments):
    if name != "echo":
        raise ValueError(f"no environment {name}")
    return Environment(**arguments)
''',
    "clients.py": """
from abc import ABC, abstractmethod


class Client(ABC):
    def __init__(self, config):
        self.config = config

    @abstractmethod
    async def close(self): ...
""",
    "types.py": """
from types import SimpleNamespace


class Response(SimpleNamespace):
    pass


class ResponseMessage(SimpleNamespace):
    pass
""",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that finds the package: one that -I does not keep from it."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "verifiers").mkdir()
    for name, text in PACKAGE.items():
        (folder / "verifiers" / name).write_text(text)
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\n# -I -c PROGRAM WORDS\nshift 2\nprogram="$1"\nshift\n'
        f'PYTHONPATH="{folder}" exec "{sys.executable}" -P -c "$program" "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def echo(python: str) -> Iterator[Verifiers]:
    made = Verifiers("echo", python)
    yield made
    made.close()


def row(number: int = 1) -> dict[str, Any]:
    return {"verifiers": {"prompt": [{"role": "user", "content": f"say {number}"}], "answer": str(number)}}


def test_a_conversation(echo: Verifiers) -> None:
    first = echo.step(echo.reset(row(), 0), "a")
    assert first["reply"] == "a, calm"
    second = echo.step(first["state"], "1")
    other = echo.step(first["state"], "2")  # another sample of the group, which said the same so far
    assert (second["reply"], other["reply"]) == ("1, calm", "2, calm")
    assert echo.step(second["state"], "stop") == {"reward": 1.0, "over": True}
    assert echo.step(other["state"], "stop") == {"reward": 0.0, "over": True}
    assert json.loads(json.dumps(second["state"])) == second["state"]


def test_a_new_process_leads_a_conversation_to_its_place(echo: Verifiers, python: str) -> None:
    state = echo.step(echo.step(echo.reset(row(), 0), "1")["state"], "b")["state"]
    later = Verifiers("echo", python)
    assert later.step(state, "stop") == {"reward": 1.0, "over": True}
    later.close()
    random = Verifiers("echo", python, {"mood": "random"})
    with pytest.raises(ValueError, match="asked again, the environment answers otherwise"):
        random.step(state, "stop")
    random.close()


def test_conversations_that_said_the_same_keep_apart(python: str) -> None:
    """Samples of a group often begin alike; what a random environment answered them is what tells them apart."""
    made = Verifiers("echo", python, {"mood": "random"})
    begun = made.reset(row(), 0)
    first, second = (made.step(begun, "a") for _ in range(2))
    assert first["reply"] != second["reply"]
    assert made.step(first["state"], "repeat")["reply"] == first["reply"]
    assert made.step(second["state"], "repeat")["reply"] == second["reply"]
    made.close()
    made = Verifiers("echo", python)  # nothing tells them apart: each is one that is open, and none is led there again
    alike = [made.step(begun, "a") for _ in range(2)]
    assert sorted(made.step(one["state"], "count")["reply"] for one in alike) == ["rollout 1", "rollout 2"]
    made.close()


def test_a_conversation_that_failed_is_not_kept(python: str) -> None:
    made = Verifiers("echo", python)
    begun = made.reset(row(), 0)
    for _ in range(3):
        assert made.step(begun, "a")["reply"] == "a, calm"
        with pytest.raises(ValueError, match="message of the role tool"):
            made.step(begun, "odd")
    assert made.step(begun, "open")["reply"] == "4 open"  # three that wait for a message, and this one
    made.close()


def test_a_rubric_that_scores_groups_gets_whole_groups(python: str) -> None:
    """Another process scores it than the one that led the conversations; one that was cut off is none of the group."""
    made, other = (Verifiers("echo", python, {"mood": "group"}) for _ in range(2))
    begun, group = made.reset(row(), 0), list[dict[str, Any]]()
    for texts in (["stop"], ["a", "b", "stop"], ["a"]):
        state, reward = begun, 0.0
        for text in texts:
            answer = made.step(state, text)
            state, reward = answer.get("state", state), reward + answer.get("reward", 0.0)
        group.append({"state": state, "reward": reward, "text": "", "finish_reason": "stop"})
    assert [one["reward"] for one in group] == [0.0] * 3
    assert other.score_group(row(), group) == [0.25, 0.75, 0.0]
    assert other.score_group(row(), group[2:]) == [0.0]
    group[1]["state"]["replies"][0] = "something else"
    with pytest.raises(ValueError, match="asked again, the environment answers otherwise"):
        other.score_group(row(), group)
    with pytest.raises(ValueError, match="the environment failed: it fell over"):
        made.step(begun, "fail")
    made.close()
    other.close()
    alone = Verifiers("echo", python)  # whose rubric scores each rollout
    answer = alone.step(alone.reset(row(), 0), "stop")
    assert "state" not in answer
    assert alone.score_group(row(), [{"state": begun, "reward": 2.0}]) == [2.0]
    alone.close()


def test_the_oldest_conversations_are_closed(python: str) -> None:
    made = Verifiers("echo", python)
    begun = made.reset(row(), 0)
    first, *_ = [made.step(begun, f"a{n}") for n in range(verifiers_side.OLDEST + 20)]
    assert made.step(begun, "open")["reply"] == f"{verifiers_side.OLDEST + 1} open"
    assert made.step(first["state"], "b")["reply"] == "b, calm"  # it is led to its place again
    made.close()


def test_what_goes_wrong_costs_a_turn(echo: Verifiers, python: str) -> None:
    begun = echo.reset(row(), 0)
    with pytest.raises(ValueError, match="RuntimeError: no idea"):
        echo.step(begun, "raise")
    with pytest.raises(ValueError, match="the environment failed: it fell over"):
        echo.step(begun, "fail")
    assert echo.step(begun, "a")["reply"] == "a, calm"
    for _ in range(2):
        with pytest.raises(ValueError, match="its Python has ended: noise"):
            echo.step(begun, "exit")
        assert echo.step(begun, "a")["reply"] == "a, calm"  # another one was started
    with pytest.raises(ValueError, match="has no field 'verifiers': make rows with python -m gspo_hpc"):
        echo.reset({}, 0)
    for mood, said in (("tools", "offers tools by the interface of an API"), ("bossy", "message of the role system")):
        made = Verifiers("echo", python, {"mood": mood})
        with pytest.raises(ValueError, match=said):
            made.step(begun, "a")
        made.close()
    made = Verifiers("ecko", python)
    with pytest.raises(ValueError, match="no environment ecko"):
        made.step(begun, "a")
    made.close()


def test_rows_and_a_pool_of_processes(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    assert verifiers.main(["echo", str(file), "--python", python, "--rows", "2"]) == 0
    rows = load_rows(file, Data())
    assert [one.text for one in rows] == ["say 0", "say 1"] and rows[1].fields["answer"] == "1"
    assert "info" not in rows[0].fields["verifiers"]
    plain = tmp_path / "plain.jsonl"
    assert verifiers.main(["echo", str(plain), "--python", python, "--args", '{"mood": "plain"}']) == 0
    assert [one.text for one in load_rows(plain, Data())] == ["say 0", "say 1", "say 2"]
    words = [
        "environment.name=verifiers",
        f"environment.args={{id: echo, python: '{python}'}}",
        "environment.workers=2",
    ]
    config = loader.load(None, [*words, "reward.functions=[{function: environment}]"])
    assert not list(preflight.environments(config))
    with turn_pool(config, 1) as pool:
        pool.submit("a", "1", 1, "", asked(rows[1].fields, 0, None))
        ((_, result),) = pool.poll(timeout=None)
        assert result.turn is not None and result.turn.reply == "1, calm", result.failure
        for number in range(4):  # whichever process takes it
            pool.submit(number, "stop", 1, "", asked(rows[1].fields, 0, result.turn.state))
        done = []
        while pool.pending:
            done += pool.poll(timeout=None)
    assert [one.value for _, one in done] == [1.0] * 4
    with pytest.raises(ValueError, match="environment.name: verifiers: .*there is no such program"):
        turn_pool(loader.load(None, ["environment.name=verifiers", "environment.args={id: a, python: /no}"]), 1)


REAL = os.environ.get("GSPO_HPC_VERIFIERS")


@pytest.mark.skipif(REAL is None, reason="GSPO_HPC_VERIFIERS names no Python with verifiers")
def test_a_real_environment(tmp_path: Path) -> None:
    """An environment of one turn, with its own data and its own rubric, which counts claims."""
    assert REAL is not None
    file = tmp_path / "rows.jsonl"
    assert verifiers.main(["sophistry-bench-sprint", str(file), "--python", REAL, "--rows", "3"]) == 0
    rows = load_rows(file, Data())
    assert len(rows) == 3
    made = Verifiers("sophistry-bench-sprint", REAL)
    texts = ["", *("<claim>It is so.</claim>" * count for count in (2, 8, 40))]
    rewards = [[made.step(made.reset(one.fields, 0), text) for text in texts] for one in rows]
    made.close()
    for answers in rewards:
        assert all(answer["over"] and isinstance(answer["reward"], float) for answer in answers)
        _, few, right, many = (answer["reward"] for answer in answers)
        assert few < right > many


@pytest.mark.skipif(REAL is None, reason="GSPO_HPC_VERIFIERS names no Python with verifiers")
def test_a_real_environment_whose_prompts_are_texts(tmp_path: Path) -> None:
    assert REAL is not None
    file, name = tmp_path / "rows.jsonl", "stardata.envs.constraint_gym"
    assert verifiers.main([name, str(file), "--python", REAL, "--rows", "2"]) == 0
    rows = load_rows(file, Data())
    assert all(one.text.startswith("Write a haiku") for one in rows)
    made = Verifiers(name, REAL)
    answer = made.step(made.reset(rows[0].fields, 0), "An old silent pond")
    made.close()
    assert answer["over"] and 0.0 <= answer["reward"] <= 1.0


GROUP = """
import verifiers as vf
from datasets import Dataset


def longest(completions, **kwargs) -> list[float]:
    lengths = [len(str(one[-1].content)) for one in completions]
    return [float(length == max(lengths)) for length in lengths]


def some(completion, **kwargs):
    return 0.5


def load_environment():
    rows = Dataset.from_list([{"question": "Write.", "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[longest, some]))
"""


def with_module(folder: Path, name: str, text: str) -> str:
    """A Python with the real package, and with a module."""
    (folder / f"{name}.py").write_text(text)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH="{folder}" exec "{REAL}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.skipif(REAL is None, reason="GSPO_HPC_VERIFIERS names no Python with verifiers")
def test_a_group_with_the_real_package(tmp_path: Path) -> None:
    program, file = with_module(tmp_path, "longest_of_group", GROUP), tmp_path / "rows.jsonl"
    assert verifiers.main(["longest_of_group", str(file), "--python", program]) == 0
    (row,) = load_rows(file, Data())
    made = Verifiers("longest_of_group", program)
    ends = [made.step(made.reset(row.fields, 0), text) for text in ("a", "the longest", "b")]
    group = [{"state": end["state"], "reward": end["reward"], "text": "", "finish_reason": "stop"} for end in ends]
    assert made.score_group(row.fields, group) == [0.5, 1.5, 0.5]
    made.close()


TURNS = """
import verifiers as vf
from datasets import Dataset


class Count(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        state["turns"] = state.get("turns", 0) + 1
        return [vf.UserMessage(content=f"{state['turns']} said, go on")]


async def said(completion, **kwargs):
    return float(sum(message.role == "assistant" for message in completion))


def load_environment(max_turns=3):
    rows = Dataset.from_list([{"question": "Count.", "answer": "3"}])
    return Count(dataset=rows, rubric=vf.Rubric(funcs=[said]), max_turns=max_turns)
"""


@pytest.mark.skipif(REAL is None, reason="GSPO_HPC_VERIFIERS names no Python with verifiers")
def test_a_conversation_with_the_real_package(tmp_path: Path) -> None:
    program, file = with_module(tmp_path, "count_turns", TURNS), tmp_path / "rows.jsonl"
    assert verifiers.main(["count_turns", str(file), "--python", program]) == 0
    (row,) = load_rows(file, Data())
    made, later = (Verifiers("count_turns", program) for _ in range(2))
    first = made.step(made.reset(row.fields, 0), "one")
    second = made.step(first["state"], "two")
    assert [one["reply"] for one in (first, second)] == ["1 said, go on", "2 said, go on"]
    assert made.step(second["state"], "three") == {"reward": 3.0, "over": True}
    assert later.step(second["state"], "three") == {"reward": 3.0, "over": True}, "led there again"
    made.close()
    later.close()
