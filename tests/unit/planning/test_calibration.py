"""Constants are what the calibration rows of docs/estimates.md determine, by the solver that prints them (5 s)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gspo_hpc.planning.estimates import devices, engines, passes, rates

TOOLS = str(Path(__file__).parents[3] / "tools")


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(TOOLS)
    yield __import__("calibration")
    for name in ("calibration", "published_runs", "published_syncs", "later_runs", "estimates", "generated"):
        sys.modules.pop(name, None)


def test_constants_are_what_calibration_rows_determine_rounded(calibration: ModuleType) -> None:
    found, h20 = calibration.determined(), devices.find("H20")
    assert (h20.products, h20.reads) == (round(found.products, 2), round(found.reads, 2))
    assert round(found.spread, 1) == rates.SPREAD
    assert (round(found.sync, 1), round(found.overhead, 1)) == (rates.SYNC_SECONDS, rates.OVERHEAD_SECONDS)
    assert round(found.switch) == rates.SWITCH_SECONDS
    assert round(found.launching) == devices.find("GB200").launching
    assert round(1e6 * found.launch) == pytest.approx(1e6 * rates.EXPERT_LAUNCH)
    assert found.possible


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("launching", 0.99),
        ("sync", -0.1),
        ("overhead", -0.1),
        ("switch", -0.1),
        ("launch", -1e-6),
        ("products", 9.0),
        ("reads", 9.0),
    ],
)
def test_figures_that_no_machine_has_are_not_possible(calibration: ModuleType, name: str, value: float) -> None:
    """No negative seconds, no share of a card's peak above 1, no CPU of GB200 that launches faster than others."""
    found = calibration.determined()
    assert dataclasses.replace(found, launching=1.0).possible
    assert not dataclasses.replace(found, **{name: value}).possible


def test_no_held_out_row_has_a_part_in_a_constant(calibration: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the seconds and phases of every other row leave what is determined, and what is bounded, as it is."""
    before, least = calibration.determined(), calibration.bounds("STEP_SECONDS")
    calibration.bounds.cache_clear()
    for run in calibration.RUNS:
        if not run.calibration:
            monkeypatch.setitem(run.__dict__, "seconds", 2 * run.seconds)
            monkeypatch.setitem(run.__dict__, "phases", {name: 2 * value for name, value in run.phases.items()})
    assert calibration.determined() == before
    assert [end.value for end in calibration.bounds("STEP_SECONDS")] == [end.value for end in least]


def test_other_constants_and_cards_are_put_back(calibration: ModuleType) -> None:
    h20, kept = devices.find("H20"), rates.SPREAD
    calibration.before()
    calibration.otherwise()
    sync, counted, constants = passes.sync, (passes.seconds, engines.prefill), (rates.SYNC_SECONDS, rates.EXPERT_LAUNCH)
    calibration.other_syncs()
    calibration.former_mixtures()
    assert devices.find("H20") == h20 and rates.SPREAD == kept
    assert passes.sync is sync and (passes.seconds, engines.prefill) == counted
    assert (rates.SYNC_SECONDS, rates.EXPERT_LAUNCH) == constants


def test_the_sync_and_the_rest_of_the_calibration_row_are_each_as_published(calibration: ModuleType) -> None:
    """Near together is not enough: a sync that is too low and an overhead that is too high would cancel."""
    (row,) = (run for run in calibration.KNOWN_H20 if run.calibration)
    seconds, rest = row.estimate().seconds, row.seconds - sum(row.phases.values())
    assert seconds["sync"] == pytest.approx(row.phases["sync"], rel=0.02)
    assert seconds["other"] == pytest.approx(rest, abs=0.05)


def test_the_step_of_a_mixture_bounds_both_constants_of_experts(calibration: ModuleType) -> None:
    """It is one number: with none of the engine's seconds products must take more, with the most nothing."""
    least, most = calibration.bounds("EXPERTS_SECONDS")
    assert "EXPERTS_SECONDS" in calibration.FREE  # the table of bounds
    assert least.value == 0.0 < rates.EXPERTS_SECONDS < most.value < 3e-4
    assert least.found.launch > rates.EXPERT_LAUNCH > most.found.launch
    assert most.found.launch == pytest.approx(0.0, abs=2e-6)
    assert least.found.switch == most.found.switch == calibration.determined().switch


def test_the_source_of_every_constant_is_told(calibration: ModuleType) -> None:
    used = {name for name, value in vars(rates).items() if name.isupper() and isinstance(value, float)}
    assert set(__import__("estimates").ORIGINS) == used


def test_one_row_of_the_benchmark_calibrates(calibration: ModuleType) -> None:
    runs = calibration.KNOWN_H20
    assert [run.key for run in runs if run.calibration] == ["verl_qwen3_4b_16_h20_steps_101_200"]
    assert sum(run.is_known_prediction for run in runs) == len(runs) - 1 == 14
