"""A plan with dynamic sampling, whose prompts are not known beforehand. It takes a second.

It would catch settings that can replace nothing or that no group satisfies, a plan that shows numbers of a run without
replaced groups as if they were certain, and one that says of fewer or more prompts than a run that they are different.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rollout.resampling import DrawLimits

BATCH = {"num_generations": 8, "global_batch_size": 512, "micro_batch_tokens": 8192}
REWARD = {"functions": [{"function": "number_match"}, {"function": "length", "args": {"target": 10}}]}


def plan(rows: int | None = None, algorithm: str = "grpo", reward: Any = REWARD, **rollout: Any) -> Any:
    raw = {"batch": BATCH, "rollout": rollout, "reward": reward, "algorithm": {"name": algorithm}}
    return make_plan(from_dict(raw | {"run": {"max_steps": 10}}), rows=rows)


def broken(**rollout: Any) -> list[str]:
    return [one.message for one in plan(dynamic_sampling=True, **rollout).broken if "sampling" in one.message]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"max_num_gen_batches": 1}, "rollout.max_num_gen_batches (1) must be 2 or more"),
        ({"dynamic_sampling_metric": "acc"}, "must be one of reward.functions: number_match, length"),
        ({"oversampling_factor": 11}, "rollout.oversampling_factor (11) must not be above"),
    ],
)
def test_settings_that_cannot_replace_a_group_are_refused_in_one_line(rollout: dict[str, Any], message: str) -> None:
    (found,) = broken(**rollout)
    assert message in found and "\n" not in found


def test_a_bound_that_is_too_small_is_told_once_and_not_as_a_factor_that_is_too_large() -> None:
    """Two batches are what the bound becomes, and they hold the factor."""
    (found,) = broken(max_num_gen_batches=1, oversampling_factor=2.0)
    assert found.startswith("rollout.max_num_gen_batches (1) must be 2 or more")
    assert broken(max_num_gen_batches=2, oversampling_factor=2.0) == []


def test_the_range_of_prompts_and_what_may_come_twice_are_said() -> None:
    assert broken(dynamic_sampling_metric="number_match", oversampling_factor=2.5) == []
    notes = " ".join(plan(rows=1000, dynamic_sampling=True).notes)
    assert "a rollout draws 64 to 640 prompts" in notes
    assert "may draw 640 prompts of 1,000: beyond 500 of them a prompt may come again" in notes
    assert "come again" not in " ".join(plan(rows=2000, dynamic_sampling=True).notes)
    assert "are carried over" not in notes, "nobody knows in which rollout an epoch ends"
    assert "are carried over" in " ".join(plan(rows=1000).notes)


@pytest.mark.parametrize("rows", [64, 100, 127, 128, 130, 1000])
def test_as_many_prompts_as_the_plan_says_are_different_in_one_rollout(rows: int) -> None:
    """They are never fewer than a rollout trains on, however few there are."""
    found = plan(rows=rows, dynamic_sampling=True)
    (told,) = [
        re.search(r"beyond ([\d,]+) of them a prompt may come again", one) for one in found.notes if "of them" in one
    ]
    assert told is not None
    different = int(told[1].replace(",", ""))
    limits = DrawLimits.of(from_dict({"batch": BATCH, "rollout": {"dynamic_sampling": True}}).rollout, 64)
    assert different == limits.window(rows) >= 64


def test_settings_without_dynamic_sampling_and_the_recipe_of_dapo_are_pointed_out() -> None:
    found = plan(max_num_gen_batches=3, oversampling_factor=2.0).warnings
    assert sum("changes nothing without rollout.dynamic_sampling" in one for one in found) == 2
    reminds = "rollout.dynamic_sampling=true turns it on"
    assert reminds in " ".join(plan(algorithm="dapo").notes)
    assert reminds not in " ".join(plan(algorithm="dapo", dynamic_sampling=True).notes + plan().notes)
