"""Evaluation sets: what is stored of them, scored, graded again and compared, and what a config must not say of them.

It would catch scores of one set that count the prompts of another, a mean over prompts with other numbers of samples, a
grader of one set that grades another, and a set whose name, graders or length of answers cannot be. Without an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import changes
from gspo_hpc.config.derived import decider, eval_of, has_unseen, rewards_count
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.rows import load_parts
from gspo_hpc.data.sources import parts, unseen
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.compare import compare
from gspo_hpc.evaluation.rescore import rescore
from gspo_hpc.planning import judges
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rewards.registry import source_weights
from tests.unit.evaluation.kept import evaluation, row

SETS: list[dict[str, Any]] = [
    {"name": "easy", "files": "easy.jsonl", "samples": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 20},
    {"name": "hard", "files": "hard.jsonl", "rewards": {"exact_match": 1}, "max_tokens": 32, "max_prompts": 3},
]
FUNCTIONS = [{"function": "number_match"}, {"function": "exact_match"}]


def config(sets: list[dict[str, Any]] | None = None, **more: Any) -> Config:
    """A config with two sets, or with others."""
    base: dict[str, Any] = {"data": {"eval_sets": SETS if sets is None else sets}, "reward": {"functions": FUNCTIONS}}
    base["eval"] = {"samples": 4, "temperature": 0.8, "max_tokens": 64}
    return from_dict({**base, **more})


def of_set(name: str, number: int, greedy: bool, *samples: bool) -> dict[str, Any]:
    """A prompt of a set, as it is stored."""
    return row(number, greedy, samples, set=name, fields={"answer": number, "data_source": name})


ROWS = [
    row(0, True, [True, False]),
    of_set("easy", 0, True, True, True, False, True),
    of_set("easy", 1, False, False, False, False, False),
    of_set("hard", 0, False),
]


def test_a_set_is_asked_as_it_says_and_otherwise_as_all_are() -> None:
    found = config()
    easy, hard, others = (eval_of(found, name) for name in ("easy", "hard", ""))
    assert (easy.samples, easy.temperature, easy.top_p, easy.top_k, easy.max_tokens) == (2, 0.5, 0.9, 20, 64)
    assert (hard.samples, hard.temperature, hard.top_p, hard.max_tokens, hard.max_prompts) == (4, 0.8, 1.0, 32, 3)
    assert others == found.eval and has_unseen(found.data)
    assert decider(found, found.data.eval_sets[1]) == "exact_match" and decider(found) == "number_match"


def test_as_many_prompts_of_a_set_are_asked_as_it_says() -> None:
    """Prompts of no set come first, whatever their rows call themselves."""
    named = [("hard", 5), ("elsewhere", 3), (["a"], 3), ("easy", 5)]
    tokens = np.zeros(1, np.int32)
    prompts = [Prompt(n, tokens, "", {"data_source": name}) for name, count in named for n in range(count)]
    found = unseen.by_set(prompts, config(eval={"max_prompts": 4}))
    assert [(name, len(own)) for name, own in found.items()] == [("", 4), ("easy", 4), ("hard", 3)]
    assert list(unseen.by_set(prompts[:5], config())) == ["hard"]


ONLY = [{"function": "exact_match", "only_named": True}, {"function": "number_match", "weight": 0.5}]


def test_a_function_that_is_only_named_grades_nothing_else() -> None:
    found = config(reward={"functions": ONLY})
    easy, hard = found.data.eval_sets
    assert [source_weights(found.reward, one) for one in (None, easy, hard)] == [{1: 0.5}, {1: 0.5}, {0: 1.0}]
    assert [decider(found, one) for one in (None, easy, hard)] == ["number_match", "number_match", "exact_match"]
    taught = config(
        reward={"functions": [*ONLY[:1], ONLY[1] | {"weight": 0}]}, algorithm={"teacher": "a", "kl_beta": 1.0}
    )
    assert not rewards_count(taught)


def told_of_names(functions: list[dict[str, Any]], **data: Any) -> list[str]:
    sets = {"data": {"eval_sets": SETS, **data}, "reward": {"functions": functions}}
    return [one.message for one in make_plan(from_dict(sets)).broken if one.rule == "source_rewards_are_given"]


def test_functions_that_would_grade_nothing_or_leave_prompts_without_a_grade_are_told() -> None:
    assert told_of_names(ONLY) == []
    unused = [*ONLY, {"function": "length", "only_named": True}]
    assert told_of_names(unused) == [
        "reward.functions[2] (length) is only_named, and no source or evaluation set names it in rewards: it grades "
        "nothing"
    ]
    (nothing,) = told_of_names(ONLY[:1], train="a.jsonl")
    assert nothing.startswith("all of reward.functions are only_named, and prompts of data.train or data.eval and easy")
    (misspelt,) = told_of_names(FUNCTIONS[:1])
    assert misspelt.endswith("; or add {function: exact_match, only_named: true} there, to grade nothing else"), (
        misspelt
    )


def test_rows_of_a_set_have_its_name_and_its_system_prompt(tmp_path: Path) -> None:
    (tmp_path / "easy.csv").write_text("question,answer\nwhat is 1?,1\nwhat is 2?,2\n")
    one = {"name": "easy", "files": f"{tmp_path}/easy.csv#1", "columns": {"question": "prompt"}, "system_prompt": "sum"}
    found = config([one])
    (part,) = parts.unseen(found.data)
    assert (part.key, part.limit, part.trains) == ("data.eval_sets[0].files", 1, False)
    (loaded,) = load_parts([part], found.data, 0)
    assert loaded.fields["data_source"] == "easy" and loaded.text.startswith("what is")
    source = find_source(loaded.fields, found.data)
    assert source is not None and source.system_prompt == "sum"
    moved = parts.with_paths(found, {part.key: "/elsewhere/easy.csv"})
    assert moved.data.eval_sets[0].files == "/elsewhere/easy.csv#1"


def test_a_row_that_would_be_taken_for_one_of_a_set_is_refused(tmp_path: Path) -> None:
    """It would be trained on with the graders of the set."""
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"prompt": "a", "data_source": "hard"}) + "\n")
    found = config(data={"eval_sets": SETS, "train": str(file)})
    with pytest.raises(ValueError, match=r"its field 'data_source' is 'hard', as a set in data.eval_sets is called"):
        load_parts(parts.training(found.data), found.data, 0)


def test_scores_are_of_all_prompts_and_of_each_set(tmp_path: Path) -> None:
    found = evaluation(tmp_path / "kept.jsonl", *ROWS)
    scores = found.scores()
    assert found.parts == ("easy", "hard") and found.samples == (0, 2, 4)
    assert scores["eval/accuracy"] == 0.5
    assert (scores["eval/easy/accuracy"], scores["eval/hard/accuracy"]) == (0.5, 0.0)
    # Of the prompts with as many samples:
    assert scores["eval/avg@2"] == 0.5 and scores["eval/avg@4"] == scores["eval/easy/avg@4"] == 0.375
    assert scores["eval/easy/pass@4"] == 0.5 and scores["eval/easy/maj@4"] == 0.5
    assert not any(name.startswith("eval/hard/avg") for name in scores)
    low, high = scores["eval/easy/avg@4_low"], scores["eval/easy/avg@4_high"]
    assert low is not None and high is not None and low < 0.375 < high


def test_a_file_whose_set_has_other_numbers_of_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r":5: has 1 samples, but line 2 has 4; it is no line"):
        evaluation(tmp_path / "kept.jsonl", *ROWS, of_set("easy", 2, True, True))


def test_sets_are_graded_again_by_their_own_functions(tmp_path: Path) -> None:
    """An answer in words is right for exact_match alone, and one with a number in it for number_match alone."""
    rows = [of_set("easy", 1, False), of_set("hard", 1, False)]
    for one in rows:
        one["greedy"]["text"] = "so it is 1"
    old = evaluation(tmp_path / "kept.jsonl", *rows)
    found = rescore(old, config())
    assert [one.decides for one in found.new.prompts] == ["number_match", "exact_match"]
    assert [one.greedy.right for one in found.new.prompts] == [True, False]
    assert found.new.parts == ("easy", "hard") and found.new.deciders == "number_match, exact_match"
    # Functions of which a set knows none grade it, too.
    other = rescore(old, config(reward={"functions": [{"function": "number_match"}]}))
    assert [one.decides for one in other.new.prompts] == ["number_match"] * 2
    assert [one.greedy.right for one in other.new.prompts] == [True, True]


def test_sets_are_compared_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = [
        row(0, True, [True, True]),
        of_set("easy", 0, True, True, True, True, True),
        of_set("easy", 1, True, True, False, False, False),
        of_set("hard", 0, False),
    ]
    sides = evaluation(tmp_path / "a.jsonl", *ROWS), evaluation(tmp_path / "b.jsonl", *second)
    found = compare(*sides)
    assert (found.whole.accuracy.difference, found.whole.prompts) == (0.25, 4)
    assert {name: (part.prompts, part.accuracy.difference) for name, part in found.parts.items()} == {
        "easy": (2, 0.5),
        "hard": (1, 0.0),
    }
    assert found.whole.average is not None and found.whole.average.difference == pytest.approx(1 / 3)
    assert found.parts["easy"].average is not None and found.parts["easy"].average.difference == 0.25
    assert found.parts["hard"].average is None
    assert main(["compare", *(str(side.path) for side in sides)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["easy/accuracy", "0.5000", "1.0000", "+0.5000"] in [line[:4] for line in lines]
    assert ["easy/avg@4", "0.3750", "0.6250", "+0.2500"] in [line[:4] for line in lines]
    assert {"avg@2/4", "hard/accuracy"} < {line[0] for line in lines if line}
    assert main(["compare", "--json", *(str(side.path) for side in sides)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sets"]["easy"]["accuracy"]["difference"] == 0.5 and told["first"]["samples"] == [0, 2, 4]


def test_a_file_without_sets_is_read_as_before(tmp_path: Path) -> None:
    found = stored.read(evaluation(tmp_path / "kept.jsonl", row(0, True), row(1, False)).path)
    assert found.parts == () and found.samples == (0,) and "eval/accuracy" in found.scores()


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (
            {"eval_sets": [SETS[0], SETS[0]]},
            {},
            "data.eval_sets has 2 sets with the name easy: give each one of its own",
        ),
        (
            {"eval_sets": [SETS[0]], "sources": [{"name": "easy", "files": "a.jsonl"}]},
            {},
            "a set in data.eval_sets and a source in data.sources are both called easy: give the set another name",
        ),
        (
            {"eval_sets": [SETS[0] | {"rewards": {"exact_matc": 1}}]},
            {},
            "rewards of set easy (data.eval_sets) have exact_matc, which is none of reward.functions; "
            "nearest: exact_match",
        ),
        (
            {"eval_sets": [SETS[0] | {"max_tokens": 2000}]},
            {"eval": {"max_tokens": 1000}, "rollout": {"max_response_length": 500}},
            "max_tokens of set easy (data.eval_sets) (2000) is above rollout.max_response_length (500), for which "
            "engines have room: give at most 500, or ask afterwards: "
            "gspo-hpc eval RUN rollout.max_response_length=2000",
        ),
    ],
)
def test_what_a_set_must_not_say(data: dict[str, Any], more: dict[str, Any], message: str) -> None:
    broken = [one.message for one in make_plan(config(data=data, **more)).broken]
    assert message in broken
    if "eval" in more:
        assert any(one.startswith("eval.max_tokens (1000) is above") for one in broken)


def test_good_sets_break_no_rule_of_data() -> None:
    found = make_plan(config(data={"eval_sets": SETS, "train": "train.jsonl"})).broken
    assert not [one for one in found if type(one.rule).__name__ == "DataRule"]


def test_an_answer_may_be_as_long_as_in_training() -> None:
    most = Config().rollout.max_response_length
    for tokens in (most, most + 1):
        broken = make_plan(config([SETS[1] | {"max_tokens": tokens}])).broken
        assert any(one.rule == "answers_fit_engines" for one in broken) == (tokens > most)


def test_only_files_of_training_are_trained_on() -> None:
    sources = [{"name": "a", "files": "a.jsonl", "eval": "b.jsonl"}]
    found = config(data={"sources": sources, "eval": "c.jsonl", "eval_sets": SETS}).data
    assert [part.key for part in parts.every(found) if part.trains] == ["data.sources[0].files"]


def test_sets_stay_the_same_between_attempts() -> None:
    """They are evaluated on, and a run's curve is of one set of prompts; so is its way to ask."""
    other = config([SETS[0] | {"samples": 3}, SETS[1]])
    refused = changes.refused_changes(config(), other)
    assert refused == [("data.eval_sets[0].samples", 2, 3)]


def test_judges_are_counted_by_set() -> None:
    graded = {"functions": [{"function": "judge", "args": {"model": "m", "prompt": "{completion}"}}]}
    found = config(
        [SETS[0] | {"max_prompts": 5}, SETS[1] | {"rewards": {"judge": 1}}],
        reward=graded,
        eval={"samples": 4, "before": True, "after": True, "max_prompts": 10},
    )
    # Two evaluations: 5 prompts with 1 + 2 answers, and 3 with 1 + 4.
    assert judges._scored_in_evaluations(found, None) == (2 * (5 * 3 + 3 * 5), True)
