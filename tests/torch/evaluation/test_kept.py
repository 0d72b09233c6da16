"""Completions that an evaluation keeps, of groups that several ranks hold: the scores are those of the file (3 s).

Catches a completion that is kept with another prompt, ranks whose completions are lost, and scores that the file cannot
give again.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.evaluation import evaluate, stored
from gspo_hpc.evaluation.scores import Scores
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.rollout.generation import Request
from gspo_hpc.training import phases
from gspo_hpc.training.jobs import evaluate as evaluate_job
from tests.torch.exchange.ranks import on_ranks

CONFIG = {"reward": {"functions": [{"function": "number_match"}, {"function": "length"}]}, "eval": {"samples": 4}}
PROMPTS = [Prompt(10 + slot, np.zeros(3, np.int32), f"question {slot}", {"answer": slot}) for slot in range(7)]


def completion(slot: int, index: int, samples: int, *, fails: bool = False) -> Completion:
    """An answer that is right for some prompts and places; of slot 5, or of all, the function that decides failed."""
    fails |= slot == 5
    right = (slot + index) % 3 == 0
    tokens = np.arange(slot + index + 1, dtype=np.int32)
    parts = {"length": 1.0} | ({} if fails else {"number_match": float(right)})
    return Completion(
        tokens,
        np.zeros(len(tokens), np.float32),
        f"{'sampled' if samples > 1 else 'greedy'} {slot if right else slot + index + 100}",
        "length" if index == 2 else "stop",
        0,
        reward_parts=parts,
        failure="number_match: raised" if fails else None,
    )


def evaluated(samples: int, *, fails: bool = False) -> tuple[Scores, list[dict[str, Any]]]:
    """The scores that three ranks agree on, and the rows of rank 0, each rank with some of the groups."""
    config = from_dict(CONFIG | {"eval": {"samples": samples}})

    def work(link: Transport) -> tuple[Scores, list[dict[str, Any]]]:
        def generate(request: Request) -> Any:
            held = [slot for slot in request.slots if (slot * request.samples) % 3 == link.rank]  # others for samples
            groups = {
                slot: Group(
                    slot,
                    PROMPTS[slot],
                    tuple(completion(slot, i, request.samples, fails=fails) for i in range(request.samples)),
                )
                for slot in held
            }
            return SimpleNamespace(own=groups)

        exchange = Exchange(link)
        worker: Any = SimpleNamespace(ranks=SimpleNamespace(exchange=exchange), generate=generate)
        found = evaluate.run(worker, [] if link.rank else PROMPTS, {"": len(PROMPTS)}, config)
        return found.scores, evaluate.rows(exchange, found, config, 20)

    (scores, rows), *others = on_ranks(3, work)
    assert others == [(scores, [])] * 2
    return scores, rows


def test_what_is_kept_gives_the_scores_again(tmp_path: Path) -> None:
    scores, rows = evaluated(4)
    stored.write(tmp_path / "kept.jsonl", rows)
    found = stored.read(tmp_path / "kept.jsonl")
    assert found.scores() == scores and {"eval/maj@4", "eval/ungraded", "eval/pass@4_low"} < scores.keys()
    assert found.step == 20 and [one.prompt for one in found.prompts] == [prompt.text for prompt in PROMPTS]
    for slot, one in enumerate(found.prompts):
        assert one.raw["row"] == 10 + slot and one.fields == {"answer": slot} and one.decides == "number_match"
        assert one.greedy.text.startswith("greedy ") and len(one.samples) == 4
        for index, each in enumerate(one.samples):
            expected = completion(slot, index, 4)
            assert (each.text, each.tokens) == (expected.text, tuple(expected.tokens.tolist()))
            assert each.raw["finish_reason"] == expected.finish_reason
            assert each.right == (slot != 5 and (slot + index) % 3 == 0) and each.graded == (slot != 5)
            assert each.raw["failure"] == expected.failure and each.raw["reward_parts"] == expected.reward_parts


def test_without_samples_the_greedy_answers_are_kept(tmp_path: Path) -> None:
    scores, rows = evaluated(1)
    assert len(rows) == 7 and all(row["samples"] == [] for row in rows)
    stored.write(tmp_path / "kept.jsonl", rows)
    assert stored.read(tmp_path / "kept.jsonl").scores() == scores and scores.keys() >= {"eval/accuracy"}


@pytest.mark.parametrize("samples", [1, 4])
def test_where_nothing_is_graded_there_is_no_score(samples: int, tmp_path: Path) -> None:
    """It was an accuracy of 0, with an interval, as if it had been measured."""
    scores, rows = evaluated(samples, fails=True)
    stored.write(tmp_path / "kept.jsonl", rows)
    assert stored.read(tmp_path / "kept.jsonl").scores() == scores
    measured = {"eval/response_length", "eval/ungraded"}
    assert {name for name, value in scores.items() if value is not None} == measured
    assert scores.keys() - measured >= {"eval/accuracy", "eval/accuracy_high"} | (
        {"eval/avg@4"} if samples > 1 else set()
    )
    failure = stored.most_common_failure(rows)
    assert failure == "number_match: raised"
    page = evaluate_job.shown(len(rows), scores, failure, as_json=False)
    lines = [line.split(maxsplit=1) for line in page.splitlines()]
    assert ["accuracy", "not graded"] in lines and ["failure", failure] in lines and "0.0000" not in page
    read = json.loads(evaluate_job.shown(len(rows), scores, failure, as_json=True))
    assert read == {"prompts": 7, **scores, "eval/failure": failure}
    assert (
        phases.told({**scores, "eval/failure": failure}, 7) == f"evaluation on 7 unseen prompts not graded: {failure}"
    )


def test_where_some_are_not_graded_the_console_says_it() -> None:
    scores, rows = evaluated(1)
    told = phases.told({**scores, "eval/failure": stored.most_common_failure(rows)}, 7)
    failed = "of which 14.3% were not graded: number_match: raised; they count as wrong"
    assert told == f"accuracy {3 / 7:.3f} on 7 unseen prompts, {failed}"
    assert phases.told({"eval/accuracy": 0.5}, 8) == "accuracy 0.500 on 8 unseen prompts"
