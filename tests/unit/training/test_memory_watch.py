"""When memory that creeps ends an attempt: never at its first step, never at the run's last, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.system import host_memory
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.observers.memory import MemoryWatch


def watched(folder: Path, limit: float | None, *used: float, first: int = 1) -> tuple[list[str], list[str | None]]:
    """Warnings, and the reason to stop after each step; memory is read from files."""
    host_memory.ROOT = folder
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").touch()
    flag, warnings, reasons = StopFlag(), list[str](), []
    config = loader.from_dict({"run": {"max_steps": 10}, "faults": {"restart_above_memory": limit}})
    watch = MemoryWatch(config, flag.request, warnings.append)
    for step, part in enumerate(used, first):
        (folder / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {1000 * (1 - part):.0f} kB\n")
        watch.step({"step": step})
        reasons.append(flag.name)
    return warnings, reasons


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)


def test_memory_that_grew_above_the_limit_stops_the_attempt(tmp_path: Path) -> None:
    warnings, reasons = watched(tmp_path, 0.9, 0.5, 0.85, 0.93)
    assert reasons[:2] == [None, None] and warnings == []
    assert reasons[2] is not None and reasons[2].startswith("memory: 93% of the memory of ")
    assert reasons[2].endswith("is in use after step 3 (faults.restart_above_memory 0.9)")


def test_memory_that_the_run_needs_from_its_first_step_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    """A restart would free nothing, and another would follow it."""
    warnings, reasons = watched(tmp_path, 0.9, 0.95, 0.96, 0.97, first=4)
    assert reasons == [None, None, None]
    (warning,) = warnings
    assert "after step 4, the first of this attempt: starting again would free nothing" in warning


def test_an_evaluation_is_no_step_and_after_the_last_step_nothing_is_to_start_again(tmp_path: Path) -> None:
    assert watched(tmp_path / "a", 0.9, 0.95, 0.5, first=0) == ([], [None, None])
    assert watched(tmp_path / "b", 0.9, 0.5, 0.95, first=9)[1] == [None, None]


def test_without_the_setting_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc").touch()  # reading it would raise
    config = loader.from_dict({"run": {"max_steps": 10}})
    MemoryWatch(config, StopFlag().request, print).step({"step": 2})
