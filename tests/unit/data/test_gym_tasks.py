"""Tasks of reasoning-gym by name: their rows, made once and equal wherever they are made, and the package's own scores.

Half a minute, for processes that import the package. It would catch rows that follow the hashes of a process, entries
that are scored otherwise once they have been JSON, and a task whose right answers get no reward.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, Data, Reward, RewardFunction
from gspo_hpc.data import gym_tasks, hub_data
from gspo_hpc.data.gym_tasks import Tasks, packed, parsed, unpacked
from gspo_hpc.data.rows import load_rows
from gspo_hpc.launch import preflight
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_names() -> None:
    assert parsed("reasoning_gym:chain_sum") == Tasks(("chain_sum",), 500, 0, {})
    found = parsed("reasoning_gym:chain_sum+gcd,size=7,seed=3,max_terms=4,word=abc,on=true")
    assert found == Tasks(("chain_sum", "gcd"), 7, 3, {"max_terms": 4, "word": "abc", "on": True})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning_gym:", "tasks are named as reasoning_gym:TASK"),
        ("reasoning_gym:a b", "tasks are named as"),
        ("reasoning_gym:gcd,7", "'7' is no option"),
        ("reasoning_gym:gcd,a=1,a=2", "the second of its name"),
        ("reasoning_gym:gcd,size=0", "size is 0: it must be a whole number from 1 on"),
        ("reasoning_gym:gcd,seed=x", "seed is 'x'"),
    ],
)
def test_wrong_names_are_told_before_anything_starts(name: str, said: str) -> None:
    with pytest.raises(ValueError, match="reasoning_gym") as refused:
        parsed(name)
    assert said in str(refused.value)
    (problem,) = preflight.data(loader.load(None, [f"data.train='{name}'"]))
    assert problem.key == "data.train" and said in str(problem) and not problem.absent


def test_rows_that_are_not_made_yet_hold_nothing_up() -> None:
    (problem,) = preflight.data(loader.load(None, ["data.train='reasoning_gym:gcd'"]))
    assert "are not made yet" in str(problem) and problem.absent


def test_an_entry_is_the_same_when_it_has_been_json() -> None:
    entry = {"a": (1, [2.5, (None, "x")]), "b": {"c": ((),)}, "d": True}
    again = unpacked(json.loads(json.dumps(packed(entry))))
    assert again == entry and isinstance(again["a"], tuple) and isinstance(again["a"][1], list)
    for wrong in ({1: 2}, {"a": {3}}, object()):
        with pytest.raises(TypeError):
            packed(wrong)


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_tasks, "_place", lambda name: None)
    with pytest.raises(ValueError, match=r"data.train: .*not installed here: pip install 'gspo-hpc\[reasoning-gym\]'"):
        hub_data.with_files(loader.load(None, ["data.train='reasoning_gym:gcd'"]))


def test_rows_of_another_version_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may ask otherwise in a new version: what is kept is of the version that made it."""
    places = set[Path | None]()
    for version in ("0.1.23", "0.1.24"):
        monkeypatch.setattr(gym_tasks.metadata, "version", lambda _, version=version: version)
        place = gym_tasks._place("reasoning_gym:gcd")
        assert place is not None
        place.parent.mkdir(parents=True)
        assert gym_tasks.kept("reasoning_gym:gcd") is None
        place.write_text("{}")
        places.add(gym_tasks.kept("reasoning_gym:gcd"))
    assert len(places) == 2


# ---- with the package ----------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    return importlib.import_module("reasoning_gym")


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    reward = Reward(functions=(RewardFunction(function="reasoning_gym"),), workers=1, timeout=60.0)
    with RewardPool(reward) as made:
        yield made


def config(name: str) -> Config:
    return loader.load(None, [f"data.train='{name}'"])


def scores(pool: RewardPool, rows: list[tuple[str, dict[str, Any]]]) -> list[RewardResult]:
    for number, (text, fields) in enumerate(rows):
        pool.submit(number, text, 1, "", fields)
    found: dict[int, RewardResult] = {}
    while pool.pending:
        found |= dict(pool.poll(timeout=None))
    return [found[number] for number in range(len(rows))]


def test_three_tasks_and_their_scores(library: Any, pool: RewardPool) -> None:
    name = "reasoning_gym:chain_sum+countdown+rearc,size=9,seed=5"
    given = hub_data.with_files(config(name))
    assert given.data.train is not None and given == hub_data.with_cached_files(config(name)) != config(name)
    rows = load_rows(given.data.train, Data())
    assert [row.fields["reasoning_gym"]["task"] for row in rows[:3]] == ["chain_sum", "countdown", "rearc"]
    assert len(rows) == 9 and len({row.text for row in rows}) == 9
    made = {task: library.create_dataset(task, size=3, seed=5) for task in ("chain_sum", "rearc")}
    for row in (row for row in rows if row.fields["reasoning_gym"]["task"] in made):
        task, entry = row.fields["reasoning_gym"]["task"], unpacked(row.fields["reasoning_gym"]["entry"])
        assert entry == made[task][row.index // 3] and row.prompt == entry["question"], "tuples, too"
    right = [(f"I think: <answer>{row.fields['answer']}</answer>", row.fields) for row in rows]
    found = scores(pool, right)
    assert [result.value for result in found] == [1.0] * 9, [result.failure for result in found]
    assert {outcome for result in found for outcome in result.outcomes.values()} == {"right"}
    wrong = scores(pool, [("<answer>no idea</answer>", rows[0].fields), ("seven", rows[0].fields), ("", {})])
    assert [result.outcomes.get("reasoning_gym") for result in wrong] == ["wrong", "unparsable", "failed"]
    assert wrong[0].value < 1.0 and wrong[1].value == 0.0 and "no field 'reasoning_gym'" in str(wrong[2].failure)
    assert preflight.data(given) is not None and not list(preflight.data(given))


def test_rows_follow_from_the_name_alone(library: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these tasks draws from a set of texts, whose order follows a number that each process draws."""
    name = "reasoning_gym:isomorphic_strings+gcd,size=20,seed=3"
    texts = []
    for seed in ("1", "2"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / seed))
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        texts.append(gym_tasks.made(name).read_bytes())
    assert texts[0] == texts[1]
    path = gym_tasks.made(name)
    changed = path.stat().st_mtime_ns
    assert gym_tasks.made(name) == path and path.stat().st_mtime_ns == changed, "once"
    assert gym_tasks.made(name.replace("seed=3", "seed=4")).read_bytes() != texts[0]
    program = "import reasoning_gym as r; print([*r.create_dataset('isomorphic_strings', size=20, seed=3)])"
    plain = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plain) == 2, "the reason why the process has a fixed one"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning_gym:chain_sun", "reasoning-gym has no task 'chain_sun'; nearest: chain_sum"),
        ("reasoning_gym:chain_sum,max_tems=3", "chain_sum does not take these options: .*max_tems"),
    ],
)
def test_what_the_package_does_not_have(library: Any, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"data.train: {name}: {said}"):
        hub_data.with_files(config(name))
    assert not gym_tasks.kept(name)
