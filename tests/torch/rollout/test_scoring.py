"""Scores of reward models become part of the reward, each group once, whatever becomes of the engine.

It would catch a part that is weighed or clipped otherwise than a function's, a failure that becomes a zero, groups that
are scored twice after a death, and a rank that waits for others without saying whether it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gspo_hpc.config.schema import Config, Reward, RewardFunction, RewardModel
from gspo_hpc.config.schema import replace as with_
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources.selection import FIELD
from gspo_hpc.engine.engine import EngineDied
from gspo_hpc.engine.scoring.classifier import Classifier
from gspo_hpc.rollout import scoring
from gspo_hpc.rollout.scoring import RewardModels, ScoringEngine

MODELS = (RewardModel(name="a", path="a"), RewardModel(name="b", path="b"))
TERMS = (
    RewardFunction(function="number_match"),
    RewardFunction(function="reward_model", weight=0.5, args={"model": "a"}, clip_range=(-1.0, 1.0)),
    RewardFunction(function="reward_model", weight=2.0, args={"model": "b"}),
)
CONFIG = with_(Config(), reward=Reward(functions=TERMS, models=MODELS))
ONE = with_(Config(), reward=Reward(functions=TERMS[:2], models=MODELS[:1]))


def group_of(slot: int, *parts: float, failure: str | None = None, **fields: Any) -> Group:
    made = [
        Completion(
            *(np.zeros(1, np.int32), np.zeros(1, np.float32), f"{slot}.{index}", "stop", 0),
            reward=0.0 if failure else value,
            reward_parts={} if failure else {"number_match": value},
            failure=failure,
        )
        for index, value in enumerate(parts)
    ]
    return Group(slot, Prompt(slot, np.zeros(1, np.int32), "p", fields), tuple(made))


def test_parts_are_clipped_and_weighed_as_those_of_functions() -> None:
    (one, two) = scoring.with_scores(group_of(0, 1.0, 0.0), {1: [3.0, -0.5], 2: [0.25, 1.0]}, CONFIG).completions
    assert one.reward_parts == {"number_match": 1.0, "reward_model": 1.0, "reward_model#2": 0.25}
    assert one.reward == 1.0 + 0.5 * 1.0 + 2.0 * 0.25 and two.reward == 0.5 * -0.5 + 2.0
    assert not one.excluded and one.failure is None


def test_a_missing_score_is_no_zero() -> None:
    (one, two) = scoring.with_scores(group_of(0, 1.0, 1.0), {1: ["too long", 0.0], 2: [1.0, 1.0]}, CONFIG).completions
    assert one.failure == "reward_model: too long" and one.excluded and one.outcomes == {"reward_model": "failed"}
    assert one.reward_parts == {"number_match": 1.0, "reward_model#2": 1.0} and two.reward == 3.0
    zero = with_(CONFIG, reward=with_(CONFIG.reward, on_failure="zero"))
    (counted,) = scoring.with_scores(group_of(0, 1.0), {1: ["too long"], 2: [1.0]}, zero).completions
    assert not counted.excluded and counted.reward == 0.0 and counted.failure == "reward_model: too long"
    (failed,) = scoring.with_scores(group_of(0, 1.0, failure="f: raised"), {1: [1.0], 2: [1.0]}, CONFIG).completions
    assert failed.failure == "f: raised" and failed.reward == 0.0 and failed.reward_parts["reward_model#2"] == 1.0
    assert scoring._usable(float("nan")) == "returned nan: a finite number up to 1e+30 is needed"


def test_a_source_has_the_terms_that_it_names() -> None:
    raw = [{"name": "s", "files": "s.jsonl", "rewards": {"reward_model#2": 3.0}}]
    data = type(CONFIG.data).model_validate({"sources": raw})
    (one,) = scoring.with_scores(
        group_of(0, 0.0, **{FIELD: "s"}), {1: [5.0], 2: [0.5]}, with_(CONFIG, data=data)
    ).completions
    assert one.reward == 1.5 and "reward_model" not in one.reward_parts


class Scripted(Classifier):
    """An engine that gives each sequence its number, and dies in the calls that the script names."""

    def __init__(self, deaths: Sequence[int] = ()) -> None:
        self.deaths, self.calls, self.awake, self.restarts = deaths, 0, False, 0
        self.asked: list[int] = []

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        assert not self.awake
        self.awake = True

    def reset_prefix_cache(self) -> None:
        assert self.awake

    def sleep(self, level: int = 1) -> None:
        assert level == 1
        self.awake = False

    def abort(self) -> None:
        """Do nothing: there are no requests."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the number of each sequence."""
        assert self.awake
        self.calls += 1
        if self.calls in self.deaths:
            raise EngineDied("planted")
        self.asked += [tokens[0] for tokens in sequences]
        return [float(tokens[0]) for tokens in sequences]


class Recovery:
    """Restarts that are counted."""

    def __init__(self, most: int = 3) -> None:
        self.count, self._most = 0, most

    def restart(self, death: EngineDied, engine: Any) -> bool:
        """Bring the engine back, as long as that is allowed."""
        self.count += 1
        if self.count > self._most:
            raise RuntimeError(f"died {self.count} times: {death}")
        return True


class Numbers:
    """A reader whose sequences are the numbers that the texts of completions have behind the point."""

    model = MODELS[0]

    def tokens(self, prompt: Prompt, completion: str) -> list[int]:
        """Return the slot and the number, as one token."""
        slot, _, index = completion.partition(".")
        if index == "9":
            raise ValueError("no")
        return [10 * int(slot) + int(index)]


def models_of(engine: Scripted, recovery: Recovery, **more: Any) -> RewardModels:
    reader: Any = Numbers()
    given: Any = recovery
    return RewardModels(ONE, {"a": ScoringEngine(engine, reader)}, given, **more)


def test_a_death_costs_the_scores_that_were_not_there() -> None:
    engine, recovery, kept = Scripted(deaths=(2, 3)), Recovery(), list[int]()
    groups = {slot: group_of(slot, *[0.0] * 10) for slot in range(6)}
    found, whole = models_of(engine, recovery).score(groups, lambda group: kept.append(group.slot))
    assert whole and recovery.count == 2 and not engine.awake
    assert sorted(found) == kept == list(range(6)) and sorted(engine.asked) == sorted(set(engine.asked))
    for slot, group in found.items():
        parts = [one.reward_parts.get("reward_model") for one in group.completions]
        assert parts == [min(1.0, 10.0 * slot + index) for index in range(9)] + [None]
        assert group.completions[9].failure == "reward_model: no"
    with pytest.raises(RuntimeError, match="died 1 times"):
        models_of(Scripted(deaths=(1,)), Recovery(0)).score(groups)


def test_a_stop_keeps_what_is_scored() -> None:
    groups, kept = {slot: group_of(slot, *[0.0] * 16) for slot in range(4)}, list[int]()
    stop: Callable[[], bool] = lambda: len(kept) >= 2  # noqa: E731
    told: list[Sequence[float]] = []

    def agree(values: Sequence[float]) -> list[float]:
        told.append(values)
        return list(values)

    engine = Scripted()
    models = models_of(engine, Recovery(), stop_requested=stop, agree=agree)
    found, whole = models.score(groups, lambda group: kept.append(group.slot))
    assert not whole and sorted(found) == kept == [0, 1] and told == [[1.0]] and not engine.awake
    _, whole = replace(models, engines={}, stop_requested=lambda: False, agree=lambda values: [1.0]).score({})
    assert not whole  # of a rank without an engine: another one was stopped
    assert models_of(Scripted(), Recovery()).score({}) == ({}, True)
