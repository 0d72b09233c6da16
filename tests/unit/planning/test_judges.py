"""Notes of plans on judges and their budget. They take no time.

They would catch a budget that bounds nothing, and counts that are not those of the run.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.plan import Plan, make_plan

PRICED = {"prompt_price": 1.0, "completion_price": 2.0}
SIZES = {
    "run": {"max_steps": 10},
    "batch": {"global_batch_size": 8, "num_generations": 4, "steps_per_generation": 2},
    "rollout": {"max_prompt_length": 100, "max_response_length": 50},
}


def planned(budget: dict[str, Any], args: dict[str, Any] | None = None, **more: Any) -> Plan:
    given = {"base_url": "http://h/v1", "model": "big", **(args or {})}
    reward = {"functions": [{"function": "judge", "args": given}]}
    return make_plan(from_dict({**SIZES, "reward": reward, "judges": budget, **more}))


def judged(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "judge" in note]


def test_a_plan_says_what_a_judge_may_get() -> None:
    """Five rollouts of 16 completions, and three evaluations of 20 prompts with a greedy answer and four samples."""
    evaluated = {"eval": {"interval": 5, "max_prompts": 20, "samples": 4}, "data": {"eval": "e.jsonl"}}
    (note,) = judged(planned({}, PRICED, **evaluated))
    assert "big judges, and may get 380 requests (80 completions of rollouts, 300 of evaluations)" in note
    assert "about 57,000 prompt tokens" in note and f"{380 * 512:,} completion tokens" in note
    assert f"a cost of {(57_000 + 2 * 380 * 512) / 1e6:,.4g}:" in note and "sent up to 4 times more" in note
    (plain,) = judged(planned({}, {"request": {"max_tokens": 5}, "max_retries": 1}))
    assert "80 requests (80 completions of rollouts, 0 of evaluations)" in plain and "400 completion tokens" in plain
    assert "a cost" not in plain and "sent up to 1 times more" in plain
    drawn = {"rollout": {**SIZES["rollout"], "dynamic_sampling": True, "max_num_gen_batches": 3}}
    (dynamic,) = judged(planned({}, **drawn))
    assert "240 requests" in dynamic
    drawn = {"rollout": {**SIZES["rollout"], "unfinished": "drop", "oversampling_factor": 1.5}}
    (ended_early,) = judged(planned({}, **drawn))
    assert "120 requests" in ended_early


def test_a_plan_says_whether_the_budget_is_enough() -> None:
    _, note = judged(planned({"max_requests": 79}))
    assert note == "judges.max_requests (79) is below what judges may get, 80: the run may end for it."
    _, note = judged(planned({"max_requests": 79, "used_up": "exclude"}))
    assert note.endswith("completions may be excluded for it.")
    assert len(judged(planned({"max_requests": 80}))) == 1
    assert len(judged(planned({"max_completion_tokens": 80 * 512}))) == 1
    _, note = judged(planned({"max_completion_tokens": 80 * 512 - 1}))
    assert note.startswith("judges.max_completion_tokens (") and "is below what judges may get, " in note


@pytest.mark.parametrize(
    ("budget", "args", "why"),
    [
        ({"max_completion_tokens": 9}, {"request": {"n": 1}}, "nothing bounds a reply of the judge: give max_tokens"),
        ({"max_cost": 1.0}, {"request": {}, **PRICED}, "judges.max_cost is a budget, but nothing bounds a reply"),
        ({"max_cost": 1.0}, {}, "judges.max_cost (1) is a budget, but the judge has no price"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: dict[str, Any], args: dict[str, Any], why: str) -> None:
    (found,) = planned(budget, args).broken
    assert found.rule == "judges_budget_bounds_something" and why in found.message
    assert planned(budget, {**PRICED, "request": {"max_completion_tokens": 9}}).valid
    assert planned({"max_cost": 1.0}, {"completion_price": 2.0}).valid, "one price is enough"


def test_a_budget_without_a_judge_is_refused() -> None:
    def broken(function: str) -> list[str]:
        plan = make_plan(from_dict({"reward": {"functions": [{"function": function}]}, "judges": {"max_requests": 5}}))
        return [one.message for one in plan.broken]

    assert broken("length") == [
        "judges.max_requests (5) is a budget, but no reward function asks a judge: give judges.max_requests=null"
    ]
    assert broken("own.py:mine") == []
