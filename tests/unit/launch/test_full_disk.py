"""The end of an attempt is recorded on a full disk, in the room that was kept for it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.launch.slurm import ending, supervisor
from gspo_hpc.launch.verdict import Verdict
from gspo_hpc.runs.directory import Attempt, open_run
from gspo_hpc.system.files import DISK_FULL
from gspo_hpc.system.signals import StopFlag


@pytest.mark.parametrize(
    ("verdict", "detail"),
    [
        (Verdict("failed", "rank 0 was killed"), f"rank 0 was killed; [Errno 28] {DISK_FULL}"),
        (Verdict("failed", f"rank 0: {DISK_FULL}"), f"rank 0: {DISK_FULL}"),
        (Verdict("preempted"), ""),
    ],
)
def test_the_room_that_is_kept_is_given_for_the_record(
    verdict: Verdict, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = loader.from_dict({"run": {"dir": str(tmp_path / "run")}, "data": {"train": str(tmp_path / "train.jsonl")}})
    run, _ = open_run(config)
    attempt, ballast = run.new_attempt(config), tmp_path / "ballast"
    ballast.touch()
    finish = Attempt.finish

    def on_a_full_disk(self: Attempt, *arguments: Any, **named: Any) -> None:
        if ballast.exists():
            raise OSError(errno.ENOSPC, DISK_FULL)
        finish(self, *arguments, **named)

    monkeypatch.setattr(Attempt, "finish", on_a_full_disk)
    recorded = ending.record(verdict, run, attempt, ballast)
    assert (recorded.reason, recorded.detail) == (verdict.reason, detail)
    (ended,) = run.read_attempts()
    assert (ended["reason"], ended["detail"]) == (verdict.reason, detail)


def test_another_error_and_a_disk_that_is_full_all_the_same_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, run = Attempt(1, tmp_path), ending.RunDir(tmp_path)
    ballast = tmp_path / "ballast"
    ballast.touch()
    for error in (OSError(errno.EIO, "an error of the disk"), OSError(errno.ENOSPC, DISK_FULL)):

        def broken(*_: Any, error: OSError = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(Attempt, "finish", broken)
        with pytest.raises(OSError, match=error.strerror):
            ending.record(Verdict("failed", "killed"), run, attempt, ballast)
        assert ballast.exists() == (error.errno == errno.EIO)


@pytest.mark.parametrize("reason", ["failed", "stopped", "preempted"])
def test_a_job_whose_disk_is_full_ends_however_its_attempt_ended(reason: str, tmp_path: Path) -> None:
    """Started again, or requeued, it would fill the disk again, and might end without a word."""
    config = loader.from_dict({"run": {"dir": str(tmp_path / "run")}})
    verdict = Verdict(reason, f"rank 0: {DISK_FULL}")
    last = supervisor._decide(verdict, config, open_run(config)[0], StopFlag())
    assert last == supervisor._Last(verdict.exit_code)
