"""Scores that an environment gives to a group together, failures that are not asked for again, and kills (20 s).

It would catch scores of one conversation that another gets, a failed conversation that is scored, an environment that a
resume asks again about what it answered, scored or failed at before, and a mistake of its that is not told.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.data.turns import GROUP
from gspo_hpc.rewards.calls import ENVIRONMENT
from gspo_hpc.rewards.environments import registry
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.runs.journal import Journal, read_turns
from tests.torch.rollout.scripted import Child, groups_of, talk

FILE = """
import json


class Walk:
    def __init__(self, asked, wrong=None):
        self.asked, self.wrong = asked, wrong

    def reset(self, fields, seed):
        return {"points": 0}

    def step(self, state, message):
        points = int(message.split()[-1])
        if points == 3:
            raise ValueError("three is not a number of points")
        return {"reward": points, "state": {"points": state["points"] + points}, "over": points == 0, "reply": "On."}


class Stroll(Walk):
    pass


class Race(Walk):
    def score_group(self, fields, conversations):
        with open(self.asked, "a") as file:
            file.write(json.dumps([fields["who"], conversations]) + "\\n")
        most = max(one["state"]["points"] for one in conversations)
        scores = [float(one["state"]["points"] == most) for one in conversations]
        return scores if self.wrong is None else eval(self.wrong)


class Inherits(Race):
    pass
"""


def race(folder: Path, *arguments: str, name: str = "Race") -> Config:
    """Return a config with an environment of the file, which has a copy in the folder then."""
    (file := folder / "race.py").write_text(FILE)
    args = ", ".join([f"asked: '{folder / 'asked'}'", *arguments])
    words = [f"environment.name={file}:{name}", f"environment.args={{{args}}}", "environment.max_turns=2"]
    return loader.load(None, [*words, "environment.workers=1"], run_code=True)


def says(seen: str, seed: int, more: int = 0) -> str:
    """Say as many points as the place of the conversation in its group, or so many more, in each message."""
    said = re.search(r"Points \d+", seen)
    return said[0] if said else f"Points {seed % 1000 + more}"


@pytest.mark.parametrize("name", ["Race", "Inherits"])
def test_a_group_is_scored_once_all_of_its_conversations_are_over(tmp_path: Path, name: str) -> None:
    """The game of two points has 4 after two messages; the one of three fails, and has no part in the race."""
    with turn_pool(config := race(tmp_path, name=name), 1) as pool:
        groups, _ = talk(config, pool, says, questions=2, samples=4)
    for group in groups.values():
        assert [one.reward for one in group.completions] == [0.0, 0.0, 1.0, 0.0]
        assert [one.reward_parts for one in group.completions] == [{ENVIRONMENT: one} for one in (0.0, 0.0, 1.0)] + [{}]
        assert [one.failure is None for one in group.completions] == [True, True, True, False]
    told = sorted((tmp_path / "asked").read_text().splitlines())
    assert len(told) == 2 and all(text.startswith(f'["you {number}", [') for number, text in enumerate(told))
    assert '"reward": 4.0' in told[0] and '{"points": 4}' in told[0] and "> On." in told[0]
    assert told[0].count('"finish_reason": "stop"') == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("1.0", "score_group returned float, not a list of 3 numbers"),
        ("scores[1:]", "score_group returned 2 scores for 3 conversations"),
        ("[*scores[1:], None]", "score_group returned None: finite numbers are needed"),
        ("[*scores[1:], float('nan')]", "score_group returned nan: finite numbers are needed"),
        ("{one: 1.0 for one in range(3)}", "score_group returned dict, not a list of 3 numbers"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_mistake_costs_the_group_and_says_what_it_is(tmp_path: Path, wrong: str, message: str) -> None:
    with turn_pool(config := race(tmp_path, f'wrong: "{wrong}"'), 1) as pool:
        (group,) = talk(config, pool, says, samples=4)[0].values()
    *three, last = (one.failure or "" for one in group.completions)
    assert all(message in one for one in three) and "three is not a number" in last
    assert all(one.reward_parts == {} and one.reward == 0.0 for one in group.completions)


def test_a_group_of_failures_is_not_scored(tmp_path: Path) -> None:
    with turn_pool(config := race(tmp_path), 1) as pool:
        groups, _ = talk(config, pool, lambda seen, seed: "Points 3", samples=2)
    assert all(one.failure for one in groups[0].completions) and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("name", ["Walk", "Stroll"])
def test_without_the_method_a_conversation_has_the_sum_of_its_rewards(tmp_path: Path, name: str) -> None:
    """A class may have the method from its base, which nobody knows beforehand."""
    with turn_pool(config := race(tmp_path, name=name), 1) as pool:
        groups, _ = talk(config, pool, says, samples=3)
    assert [(one.reward, one.failure) for one in groups[0].completions] == [(0.0, None), (2.0, None), (4.0, None)]


def test_who_scores_groups_is_read_from_the_file(tmp_path: Path) -> None:
    assert registry.scores_groups(race(tmp_path).environment), "its base class may have it, and it has"
    assert registry.scores_groups(race(tmp_path, name="Stroll").environment), "its base class may have it"
    assert not registry.scores_groups(race(tmp_path, name="Walk").environment)
    assert not registry.scores_groups(loader.load(None, ["environment.name=calculator"]).environment)
    assert not registry.scores_groups(loader.load(None, []).environment)


def test_a_method_that_takes_other_arguments_is_refused(tmp_path: Path) -> None:
    config = race(tmp_path)
    methods = [("__init__", "asked"), ("step", "state, message"), ("score_group", "conversations")]
    body = "".join(f"    def {name}(self, {takes}):\n        return {{}}\n" for name, takes in methods)
    (tmp_path / "race.py").write_text(f"class Race:\n{body}")
    with pytest.raises(ValueError, match=r"has score_group\(conversations\), which is called with fields and"):
        registry.check(config.environment)


def test_scores_of_other_conversations_are_asked_for_again(tmp_path: Path) -> None:
    """As behind a damaged line of the journal, after which a conversation went on otherwise."""
    config = race(tmp_path)

    def kept(points: int) -> Group:
        journal = Journal(tmp_path / "000000", 0, fingerprint="f", rollout=0)
        with turn_pool(config, 1) as pool:
            groups, _ = talk(config, pool, partial(says, more=points), samples=2, journal=journal)
        journal.close()
        return groups[0]

    first = kept(1)
    assert kept(1).to_json() == first.to_json() and (tmp_path / "asked").read_text().count("\n") == 1
    turns = tmp_path / "000000" / "rank-0000.turns"
    head, *lines = turns.read_text().splitlines(keepends=True)
    turns.write_text(head + lines[-1])  # the scores alone
    again = kept(4)
    assert (tmp_path / "asked").read_text().count("\n") == 2 and again.completions[1].reward == 1.0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(tmp_path, moody=True)
    yield made
    made.close()


def test_after_kills_neither_failures_nor_scores_are_asked_for_again(tmp_path: Path, child: Child) -> None:
    """Both are of chance, so what is asked again is another."""
    turns = tmp_path / "000000" / "rank-0000.turns"
    known: dict[tuple[int, int], list[str]] = {}

    def read() -> dict[tuple[int, int], list[str]]:
        return {key: [one.to_json() for one in found] for key, found in read_turns(turns.parent, "f").items()}

    def has(lines: int) -> bool:
        return turns.exists() and turns.read_bytes().count(b"\n") > lines

    for lines in (8, 24):
        assert child.run(partial(has, lines)) == signal.SIGKILL
        found = read()
        assert all(found[key][: len(before)] == before for key, before in known.items())
        known = found
    before = (tmp_path / "asked").read_text().count("\n")
    assert child.run() == 0
    every = read_turns(turns.parent, "f")
    new = sum(len(found) - len(known.get(key, ())) for key, found in every.items())
    again = (tmp_path / "asked").read_text().count("\n") - before - new
    assert 0 <= again <= 2, "only what the journal lacked; processes of the killed one may have noted their last"
    assert all(read()[key][: len(kept)] == kept for key, kept in known.items())
    scored = {slot: found[0] for (slot, sample), found in every.items() if sample == GROUP}
    for group in groups_of(tmp_path):
        turn = scored.get(group["slot"])
        places = iter(() if turn is None or turn.failure else turn.state)
        for sample, completion in enumerate(group["completions"]):
            failure = every[group["slot"], sample][-1].failure or (turn and turn.failure)
            assert completion["failure"] == failure
            assert completion["reward"] == (0.0 if failure else next(places))
    assert any(found[-1].failure for (_, sample), found in every.items() if sample != GROUP), "chance: 1 in 10^6"

    whole, asked_so_far = (tmp_path / "groups").read_bytes(), (tmp_path / "asked").read_bytes()
    assert child.run() == 0, "from the journal alone"
    assert (tmp_path / "groups").read_bytes() == whole and (tmp_path / "asked").read_bytes() == asked_so_far
