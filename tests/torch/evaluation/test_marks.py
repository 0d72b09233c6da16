"""Marks of an evaluation: which answers count as right, and for which of them the reward function failed (2 s).

Catches an answer that counts as wrong because another function failed, and failures that nobody hears of.
"""

from __future__ import annotations

import numpy as np

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import GroupTable
from gspo_hpc.evaluation.evaluate import are_graded, are_right

CONFIG = {"reward": {"functions": [{"function": "number_match"}, {"function": "judge"}]}}


def table(*parts: dict[str, float]) -> GroupTable:
    """A prompt for each completion, of which these functions gave a value."""
    none = np.zeros(0, np.int32)
    groups = [
        Group(
            slot,
            Prompt(slot, none, "", {}),
            (
                Completion(
                    none,
                    np.zeros(0, np.float32),
                    "",
                    "stop",
                    0,
                    reward_parts=given,
                    failure=None if len(given) > 1 else "x",
                ),
            ),
        )
        for slot, given in enumerate(parts)
    ]
    return GroupTable.of(groups, 0)


def test_the_function_that_decides_counts_and_no_other() -> None:
    """An answer was wrong because the judge beside the mathematics had failed."""
    given = table({"number_match": 1.0, "judge": 0.0}, {"number_match": 1.0}, {"judge": 1.0}, {"number_match": 0.5})
    config = from_dict(CONFIG)
    assert are_right(given, config) == [True, True, False, False]
    assert are_graded(given, config) == [True, True, False, True]
    judged = from_dict(CONFIG | {"eval": {"reward": "judge"}})
    assert are_right(given, judged) == [False, False, True, False]
    assert are_graded(given, judged) == [True, False, True, False]


def test_where_the_function_graded_nothing_all_are_wrong_and_ungraded() -> None:
    given = table({"judge": 1.0}, {"judge": 0.0})
    assert are_right(given, from_dict(CONFIG)) == are_graded(given, from_dict(CONFIG)) == [False, False]
