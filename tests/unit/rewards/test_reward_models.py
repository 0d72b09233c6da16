"""Terms that a reward model scores are left to it: no process is asked for them, and their settings are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, Reward, RewardFunction, RewardModel, Source
from gspo_hpc.config.schema import replace as with_
from gspo_hpc.data.sources.selection import FIELD
from gspo_hpc.evaluation import rescore
from gspo_hpc.launch import preflight
from gspo_hpc.rewards import judges, registry, trial
from gspo_hpc.rewards.calls import Sampled
from gspo_hpc.rewards.pool import RewardPool

MODEL = RewardModel(name="rm", path="rm")
TERMS = (
    RewardFunction(function="reward_model", weight=0.5),
    RewardFunction(function="exact_match", args={"answer": "right"}, weight=2.0),
)
SOURCES = (
    Source(name="both", files="a"),
    Source(name="scored", files="b", rewards={"reward_model": 1.0}),
)


def test_the_pool_grades_what_functions_grade() -> None:
    """A prompt whose completions a reward model alone grades would have no result, and a run would wait for it."""
    reward = Reward(functions=TERMS, models=(MODEL,), workers=1)
    with RewardPool(reward, sources=SOURCES) as pool:
        assert pool.grades({FIELD: "both"}) and pool.grades({}) and not pool.grades({FIELD: "scored"})
        pool.submit_group([1, 2], [Sampled("a", 1), Sampled("b", 1)], "p", {"right": "a"})
        found: dict[Any, Any] = {}
        while pool.pending:
            found |= dict(pool.poll(timeout=None))
    assert [(found[key].value, found[key].parts) for key in (1, 2)] == [
        (2.0, {"exact_match": 1.0}),
        (0.0, {"exact_match": 0.0}),
    ]


def test_a_trial_before_a_run_asks_no_model() -> None:
    assert trial.run(TERMS[:1], "p", {}) == [trial.Outcome(None)]


def test_a_term_finds_its_model() -> None:
    two = (MODEL, RewardModel(name="other", path="o"))
    named = RewardFunction(function="reward_model", args={"model": "other"})
    assert Reward(models=(MODEL,), functions=TERMS).scored == {0: MODEL}
    assert Reward(models=two, functions=(TERMS[0], named)).scored == {1: two[1]}
    assert Reward(functions=(named,)).scored == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"template": "How good is it?"}, "template has no {completion}"),
        ({"pattern": "score"}, "has 0 groups"),
        ({"pattern": "("}, "is not a valid regular expression"),
        ({}, None),
    ],
)
def test_a_generative_model_is_asked_in_a_form_that_gives_scores(given: dict[str, str], words: str | None) -> None:
    model = RewardModel(name="rm", path="rm", kind="generative", **given)
    found = registry.wrong_terms(Reward(models=(model,), functions=TERMS))
    assert found.keys() == ({0} if words else set()) and (words or "") in "".join(one.text for one in found.values())
    with pytest.raises(ValueError, match="unknown argument 'nmae'"):
        registry.check(
            Reward(models=(model,), functions=(RewardFunction(function="reward_model", args={"nmae": "rm"}),))
        )


def test_its_score_is_read_as_that_of_a_judge() -> None:
    assert judges.score_in("Good. Score: 3, no: Score: 7.5", judges.PATTERN) == 7.5
    with pytest.raises(ValueError, match="has no score: 'none'"):
        judges.score_in("none", judges.PATTERN)
    assert judges.message_for("{prompt}|{completion}|{a}|{b}", "p", "c", {"a": 1}) == "p|c|1|{b}"


def test_its_folder_is_looked_at_before_a_run(tmp_path: Path) -> None:
    def told(kind: str, more: str = "") -> list[str]:
        config = loader.load(None, [f"reward.models=[{{name: rm, path: {tmp_path}, kind: {kind}{more}}}]"])
        return [f"{one.key}: {one.text}" for one in preflight.problems(config, [preflight.reward_models])]

    (tmp_path / "config.json").write_text("{}")
    assert any("model.safetensors" in text for text in told("classification"))
    weights = (8).to_bytes(8, "little") + b"{}      "
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert ["tokenizer.json" in text for text in told("classification")] == [True]
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    assert told("classification") == []  # it may do without a chat template, and its family is the engine's business
    assert told("generative") == [f"reward.models[0].path: the tokenizer in {tmp_path} has no chat template"]
    assert told("generative", ", chat_template_kwargs: {chat_template: x}") == []
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in told("classification")[0]


def test_rescore_says_what_to_give_instead() -> None:
    reward = Reward(functions=TERMS, models=(MODEL,))
    with pytest.raises(
        ValueError, match=r"rescore does not start: give .*reward.functions=\[{function: exact_match}\]"
    ):
        rescore._check(with_(Config(), reward=reward))
