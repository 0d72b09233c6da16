"""Values derived from a run directory that was read. Takes milliseconds; catches times that are not added up."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.runs.reader import AttemptView, RunData


def attempt(number: int, started: float | None, ended: float | None) -> AttemptView:
    return AttemptView(number, started, ended, "failed", "", "", None)


@pytest.mark.parametrize(
    ("attempts", "seconds"),
    [
        (((100.0, 130.0), (200.0, 205.0)), 35.0),
        (((100.0, 130.0), (None, 205.0)), 30.0),  # a start that is not known counts nothing
        (((100.0, None),), 6.0),  # none is known: what the steps took
        ((), 6.0),
    ],
)
def test_the_time_of_a_run_is_that_of_all_its_attempts(
    attempts: tuple[tuple[float | None, float | None], ...], seconds: float
) -> None:
    records = ({"step": 1, "seconds": 2.0}, {"step": 2, "seconds": 4.0}, {"step": 3, "seconds": None})
    views = tuple(attempt(number, *times) for number, times in enumerate(attempts, 1))
    assert RunData(Path("run"), {}, None, {}, records, (), views).seconds == seconds
