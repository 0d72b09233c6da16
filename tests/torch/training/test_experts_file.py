"""The tokens of experts are written where the report reads them. Under a second, once torch is there."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import read_run
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.observers.files import ExpertsFile


def test_the_latest_update_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    observers = Observers([ExpertsFile(RunDir(tmp_path))])
    for step in (3, 4):
        observers.experts(step, {1: [5, 0, step], 11: [1, 2, 3]})
    assert read_run(tmp_path).experts == (4, {1: [5, 0, 4], 11: [1, 2, 3]})
    assert (tmp_path / "experts.json").stat().st_mode & 0o077 == 0
