"""A plan of a run whose solved prompts are retired. It takes a second.

It would catch a pass rate that no group can have, a number of right completions other than the one at which a run
retires a prompt, a rate beside a teacher whose prompts teach although they are solved, a plan that shows the length of
later epochs as if it were certain, and a setting in vain that is not told.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from gspo_hpc.config.changes import may_change
from gspo_hpc.config.loader import ConfigError, from_dict, load
from gspo_hpc.data.retired import retirements
from gspo_hpc.planning.plan import make_plan

BATCH = {"num_generations": 8, "global_batch_size": 512, "micro_batch_tokens": 8192}
REWARD = {"functions": [{"function": "number_match"}]}


def plan(rate: float | None, rows: int | None = 128, steps: int = 10, **sections: Any) -> Any:
    raw = {"batch": BATCH, "reward": REWARD, "run": {"max_steps": steps}, "data": {"no_resampling_pass_rate": rate}}
    return make_plan(from_dict(raw | sections), rows=rows)


@pytest.mark.parametrize("rate", [0, 1.1, -0.5, "most"])
def test_a_share_that_is_none_is_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match="data.no_resampling_pass_rate"):
        from_dict({"data": {"no_resampling_pass_rate": rate}})


def test_names_of_other_projects_are_answered_and_a_run_keeps_its_rate() -> None:
    for name in ("no_resampling_pass_rate", "buffer.easy_threshold", "rollout.no_resampling_pass_rate"):
        with pytest.raises(ConfigError, match=r"data\.no_resampling_pass_rate"):
            load(None, [f"{name}=0.9"])
    assert not may_change("data.no_resampling_pass_rate")


def test_a_teacher_alone_refuses_it() -> None:
    taught = {"algorithm": {"name": "gspo", "teacher": "a/model", "kl_beta": 1}, "reward": {"functions": []}}
    (found,) = [one.message for one in plan(0.9, **taught).broken if "no_resampling_pass_rate" in one.message]
    assert "data.no_resampling_pass_rate=null" in found and "\n" not in found
    both = taught | {"reward": REWARD}
    assert not [one for one in plan(0.9, **both).broken if "no_resampling_pass_rate" in one.message]


@pytest.mark.parametrize(("rate", "right"), [(0.9, 8), (0.875, 7), (0.5, 4), (1, 8), (0.01, 1)])
def test_what_the_rate_means_for_a_group_and_how_a_run_may_end_are_said(rate: float, right: int) -> None:
    (note,) = [one for one in plan(rate).notes if "retired" in one]
    assert f"at a pass rate of {rate:g}, {right} of the 8 completions" in note
    assert re.search(r"ends before max_steps if fewer than the 64 of a rollout are left", note)
    assert not [one for one in plan(None).notes if "retired" in one]


@pytest.mark.parametrize(("rate", "group"), [(0.28, 25), (0.07, 100), (0.55, 20), (0.9, 8), (0.3, 10), (1, 7)])
def test_as_many_right_completions_as_the_plan_says_retire_a_prompt_and_one_less_does_not(
    rate: float, group: int
) -> None:
    """Floats make 0.28 times 25 a little more than 7: the plan would say 8 of a rate with which 7 retire a prompt."""
    found = plan(rate, batch={"num_generations": group, "global_batch_size": 10 * group, "micro_batch_tokens": 8192})
    (told,) = [re.search(r"(\d+) of the (\d+) completions of a group", one) for one in found.notes if "retired" in one]
    assert told is not None
    right = int(told[1])
    assert int(told[2]) == group and 0 < right <= group
    assert retirements({0: right / group}, [3], 0, rate) and not retirements({0: (right - 1) / group}, [3], 0, rate)


def test_a_run_of_one_epoch_retires_in_vain() -> None:
    def told(**how: Any) -> bool:
        return any("no_resampling_pass_rate (0.9) changes nothing" in one for one in plan(0.9, **how).warnings)

    assert told(rows=640) and not told(rows=639) and not told(rows=None)
    assert not told(rows=640, rollout={"dynamic_sampling": True}), "replaced groups use more prompts"
