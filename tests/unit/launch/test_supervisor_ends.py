"""A supervisor's waiting and removing when ranks end: plants of an audit that no test saw (2 s).

It would catch a stop that comes too late for the rank whose save takes longest, a step without its srun that is waited
for without end, and shared memory that the attempt which has just ended leaves behind.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import ending, supervisor, takeover
from gspo_hpc.launch.verdict import Verdict
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system import leftovers
from gspo_hpc.system.control import RankState
from gspo_hpc.system.exit_codes import DONE
from gspo_hpc.system.signals import StopFlag

NOTICE = 600.0  # slurm.signal_seconds


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return loader.from_dict({"run": {"dir": str(tmp_path / "run")}, "slurm": {"signal_seconds": NOTICE}})


@pytest.fixture
def run(config: Config) -> RunDir:
    return open_run(config)[0]


@pytest.mark.parametrize(("seconds", "stops"), [((1.0, 400.0), True), ((400.0, 1.0), True), ((1.0, 1.0), False)])
def test_a_stop_leaves_time_for_the_longest_save_of_all_ranks(
    seconds: tuple[float, ...],
    stops: bool,
    config: Config,
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "end_time", lambda *_, **__: time.time() + NOTICE + 100)
    with run.lock():
        begun = run.new_attempt(config)
    attempt = supervisor._Attempt(config, run, begun, tmp_path, "7", StopFlag())
    monkeypatch.setattr(attempt, "_job", lambda: None)
    try:
        for rank, save in enumerate(seconds):
            state = RankState(rank, "n1", 1, "", time.monotonic(), time.monotonic())
            state.save_seconds = save
            attempt.server.ranks[rank] = state
        attempt._stop_if_due()
        assert (attempt.stop == "time limit") == stops
    finally:
        attempt.server.close()


def test_a_step_without_its_srun_is_cancelled_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which it may end by itself begins once, however often the supervisor looks; 300 times here."""
    looks, cancelled = tmp_path / "looks", tmp_path / "cancelled"
    programs = {
        "squeue": f'echo >> {looks}; [ -e {cancelled} ] || [ "$(wc -l < {looks})" -gt 300 ] || echo 7.0',
        "scancel": f'echo "$*" >> {cancelled}',
    }
    (folder := tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(takeover, "_POLL", 0.001)
    monkeypatch.setattr(takeover, "_LINGER", 0.1)
    takeover._end_ranks("7", {b"GSPO_HPC_RUN_ID=nobody"}, StopFlag())
    assert cancelled.read_text().splitlines() == ["7.0"]


def test_what_the_attempt_that_has_ended_left_in_memory_goes(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what earlier ones left: a supervisor that was killed has removed nothing."""
    monkeypatch.setattr(ending, "end_time", lambda *_, **__: None)
    run_id = run.read_info()["run_id"]
    left = [Path("/dev/shm", leftovers._tag(f"{run_id}:{number}") + "-left") for number in (1, 2, 3)]

    def ended(self: supervisor._Attempt) -> Verdict:
        for path in left:
            path.touch()
        self.server.close()
        return Verdict("done")

    monkeypatch.setattr(supervisor._Attempt, "run", ended)

    class Notices:
        def ended(self, reason: str, detail: str) -> None:
            assert (reason, detail) == ("done", "")

    notices: Any = Notices()
    try:
        with run.lock() as lock:
            run.new_attempt(config).finish("failed", 1, "planted", (3, 0))
            last = supervisor._attempts(config, run, lock, tmp_path, "7", StopFlag(), notices)
        assert last == supervisor._Last(DONE)
        assert [path.exists() for path in left] == [False, False, True], "the third is no attempt of this run yet"
    finally:
        for path in left:
            path.unlink(missing_ok=True)
