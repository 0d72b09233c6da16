"""Completions that an evaluation keeps, of groups that several ranks hold: the scores are those of the file (3 s).

Catches a completion that is kept with another prompt, ranks whose completions are lost, and scores that the file cannot
give again.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.evaluation import evaluate, stored
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.rollout.generation import Request
from tests.torch.exchange.ranks import on_ranks

CONFIG = {"reward": {"functions": [{"function": "number_match"}, {"function": "length"}]}, "eval": {"samples": 4}}
PROMPTS = [Prompt(10 + slot, np.zeros(3, np.int32), f"question {slot}", {"answer": slot}) for slot in range(7)]


def completion(slot: int, index: int, samples: int) -> Completion:
    """An answer that is right for some prompts and places; of slot 5 the function that decides failed."""
    right = (slot + index) % 3 == 0
    tokens = np.arange(slot + index + 1, dtype=np.int32)
    parts = {"length": 1.0} | ({} if slot == 5 else {"number_match": float(right)})
    return Completion(
        tokens,
        np.zeros(len(tokens), np.float32),
        f"{'sampled' if samples > 1 else 'greedy'} {slot if right else slot + index + 100}",
        "length" if index == 2 else "stop",
        0,
        reward_parts=parts,
        failure="number_match: raised" if slot == 5 else None,
    )


def evaluated(tmp_path: Path, samples: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The scores that three ranks agree on, and the rows of rank 0, each rank with some of the groups."""
    config = from_dict(CONFIG | {"eval": {"samples": samples}})

    def work(link: Transport) -> tuple[dict[str, float], list[dict[str, Any]]]:
        def generate(request: Request) -> Any:
            held = [slot for slot in request.slots if (slot * request.samples) % 3 == link.rank]  # others for samples
            groups = {
                slot: Group(
                    slot, PROMPTS[slot], tuple(completion(slot, i, request.samples) for i in range(request.samples))
                )
                for slot in held
            }
            return SimpleNamespace(own=groups)

        exchange = Exchange(link)
        worker: Any = SimpleNamespace(ranks=SimpleNamespace(exchange=exchange), generate=generate)
        found = evaluate.run(worker, [] if link.rank else PROMPTS, len(PROMPTS), config)
        return found.scores, evaluate.rows(exchange, found, config, 20)

    (scores, rows), *others = on_ranks(3, work)
    assert others == [(scores, [])] * 2
    return scores, rows


def test_what_is_kept_gives_the_scores_again(tmp_path: Path) -> None:
    scores, rows = evaluated(tmp_path, 4)
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
    scores, rows = evaluated(tmp_path, 1)
    assert len(rows) == 7 and all(row["samples"] == [] for row in rows)
    stored.write(tmp_path / "kept.jsonl", rows)
    assert stored.read(tmp_path / "kept.jsonl").scores() == scores and scores.keys() >= {"eval/accuracy"}
