"""Metrics of a step by the source of its prompts, and who decides what is right (no model, the import of Megatron).

It would catch a metric of one source that counts completions of the other, a source whose answers another source's
function marks, and a mean reward that counts what a function never graded as 0.
"""

from __future__ import annotations

import numpy as np

from gspo_hpc.config.derived import decider
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources import stream
from gspo_hpc.data.table import GroupTable, concatenate
from gspo_hpc.evaluation.by_source import graded_rows, source_epochs, source_metrics
from gspo_hpc.evaluation.evaluate import are_graded, are_right

CONFIG = from_dict(
    {
        "data": {
            "sources": [
                {"name": "sums", "files": "a.jsonl", "weight": 1},
                {"name": "style", "files": "b.jsonl", "weight": 1, "rewards": {"length": 1, "regex": 1}},
                {"name": "unseen", "files": "c.jsonl", "weight": 1},
            ]
        },
        "reward": {"functions": [{"function": "number_match"}, {"function": "length"}, {"function": "regex"}]},
    }
)


def group(slot: int, source: str, *completions: tuple[dict[str, float], float, int, bool]) -> Group:
    """Completions: parts of the reward, advantage, tokens, and whether it is left out."""
    return Group(
        slot,
        Prompt(slot, np.zeros(2, np.int32), "", {"data_source": source}),
        tuple(
            Completion(
                tokens=np.zeros(tokens, np.int32),
                logprobs=np.zeros(tokens, np.float32),
                text="",
                finish_reason="length" if tokens > 8 else "stop",
                seed=0,
                reward=sum(parts.values()),
                reward_parts=parts,
                advantage=advantage,
                excluded=excluded,
            )
            for parts, advantage, tokens, excluded in completions
        ),
    )


TABLE = concatenate(
    [
        GroupTable.of(
            [
                group(
                    0, "sums", ({"number_match": 1.0, "length": 0.0, "regex": 1.0}, 1.0, 4, False), ({}, 0.0, 2, True)
                ),
                group(1, "sums", *[({"number_match": 0.0, "length": 1.0, "regex": 1.0}, 0.0, 3, False)] * 2),
            ],
            0,
        ),
        GroupTable.of([group(2, "style", *[({"length": one, "regex": 0.0}, one, 9, False) for one in (1.0, 0.0)])], 1),
    ]
)


def test_metrics_of_a_source_are_those_of_its_completions() -> None:
    assert source_metrics(TABLE, CONFIG) == {
        "source/sums/groups": 2,
        "source/sums/response_length": 3.0,
        "source/sums/truncated_fraction": 0.0,
        "source/sums/accuracy": 0.25,
        "source/sums/no_signal_fraction": 0.5,
        "source/sums/reward": 2.0,
        "source/style/groups": 1,
        "source/style/response_length": 9.0,
        "source/style/truncated_fraction": 1.0,
        "source/style/accuracy": 0.5,
        "source/style/no_signal_fraction": 0.0,
        "source/style/reward": 0.5,
    }
    assert source_metrics(TABLE, from_dict({})) == {}


def test_the_first_function_of_a_source_decides_unless_the_one_that_decides_elsewhere_is_among_them() -> None:
    sums, style, _ = CONFIG.data.sources
    assert (decider(CONFIG), decider(CONFIG, sums), decider(CONFIG, style)) == (
        "number_match",
        "number_match",
        "length",
    )
    assert are_right(TABLE, CONFIG) == [True, False, False, False, True, False]
    assert are_graded(TABLE, CONFIG) == [True, False, True, True, True, True]
    chosen = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"reward": "regex"})})
    assert decider(chosen, style) == "regex" and are_right(TABLE, chosen) == [True, False, True, True, False, False]


def test_a_mean_reward_is_over_the_sources_that_a_function_grades() -> None:
    assert graded_rows(TABLE, "number_match", CONFIG).tolist() == [True] * 4 + [False] * 2
    assert graded_rows(TABLE, "length", CONFIG).all()


def test_epochs_are_draws_a_prompt() -> None:
    order = stream.of(CONFIG, {"sums": 4, "style": 8, "unseen": 2}, 3, lambda size: 3)
    _, after = order.take(Position(), 12)
    assert source_epochs(order, after) == {"source/sums/epoch": 1, "source/style/epoch": 0.5, "source/unseen/epoch": 2}
    alone = stream.of(from_dict({}), {"": 8}, 3, lambda size: 3)
    assert source_epochs(alone, alone.take(Position(), 3)[1]) == {}
