"""The record of a step: a step that changed nothing says so, and counts towards the limit of skipped steps.

Costs the import of Megatron. Catches a skipped step that is logged like any other, and a limit that never ends a run.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.loop import TooManySkippedSteps, finish_step
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.step_record import step_record
from tests.torch.training.test_update import GROUPS

GAP = {"logprob_gap_weight": (8.0, 8.0), "logprob_gap_weight_squared": (16.0, 8.0)}
MADE = StepResult(
    {"ratio": (3.0, 2.0), "clip_fraction": (0.0, 0.0)} | GAP, {"logprob_gap_max": 0.5}, {}, 1.5, False, False, 1e-6
)


@pytest.mark.parametrize(
    ("result", "skipped", "empty", "in_a_row"),
    [
        (MADE, 0, 0, 0),
        (replace(MADE, skipped=True), 1, 0, 3),
        (replace(MADE, skipped=True, overflowed=True), 1, 0, 0),  # the loss scale looks for its value
        (None, 0, 1, 0),  # no advantage
    ],
)
def test_a_step_that_changed_nothing_is_recorded_as_such(
    result: StepResult | None, skipped: int, empty: int, in_a_row: int
) -> None:
    progress = Progress(Cursor(step=4, skipped_in_a_row=2))
    before = progress.advance(GROUPS, result, updates_per_rollout=4)
    record: dict[str, Any] = step_record(before, progress.cursor, GROUPS.table, result, {"update": 2.0}, 3.0, 2)
    assert (record["step"], record["update"], record["skipped"], record["empty"]) == (5, 0, skipped, empty)
    assert progress.cursor.skipped_in_a_row == in_a_row
    assert record["excluded"] == 2 and record["seconds/update"] == 2.0
    assert (record["weights_version"], record["staleness"]) == (2, 2)  # steps that had made the weights; steps since
    assert record["tokens"] == progress.cursor.completion_tokens == 2 * (3 + 5 + 7 + 11)
    if result is not None:
        assert record["ratio_mean"] == 1.5 and "clip_fraction" not in record  # a mean over nothing is left out
        assert record["logprob_gap_effective"] == 0.5 and not GAP.keys() & record.keys()


def test_a_gap_that_was_not_measured_is_no_gap_of_zero() -> None:
    progress = Progress(Cursor(step=4))
    for count, there in ((0.0, False), (8.0, True)):
        result = replace(MADE, sums=MADE.sums | {"logprob_gap": (0.0, count)})
        record = step_record(progress.cursor, progress.cursor, GROUPS.table, result, {}, 3.0, 2)
        assert ("logprob_gap_max" in record) is ("logprob_gap_mean" in record) is there


@pytest.mark.parametrize(("in_a_row", "ends"), [(3, False), (4, True)])
def test_a_run_whose_gradient_stays_not_finite_ends_after_it_has_logged_the_step(in_a_row: int, ends: bool) -> None:
    logged: list[dict[str, Any]] = []
    config = from_dict({"faults": {"max_skipped_steps": 3}})
    session: Any = SimpleNamespace(
        recipe=SimpleNamespace(config=config, evaluates_after=lambda step: False),
        clock=SimpleNamespace(seconds={"save": 1.0, "update": 2.0}),
        observers=SimpleNamespace(step=logged.append),
    )
    progress = Progress(Cursor(step=9, skipped_in_a_row=in_a_row), record={"step": 9})
    with pytest.raises(TooManySkippedSteps, match="4 steps in a row") if ends else contextlib.nullcontext():
        finish_step(session, progress)
    assert logged == [{"step": 9, "seconds/save": 1.0}]
