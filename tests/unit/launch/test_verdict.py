"""How an attempt ended and whose fault it was, from what the ranks and srun said."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.launch.verdict import (
    Verdict,
    failures_without_progress,
    finished_groups,
    judge,
    newest_rollout,
    progress,
)
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system.control import RankState

CONFIG = loader.from_dict({"cluster": {"gpus_per_node": 2}})


def rank(number: int, outcome: str | None, detail: str = "", ended_at: float = 1.0, lost: bool = False) -> RankState:
    state = RankState(number, f"n{number + 1}", 100 + number, "7.0", 0.0, 0.0)
    state.outcome, state.detail, state.ended_at, state.lost = outcome, detail, ended_at, lost
    return state


def judged(
    *states: RankState, problem: str | None = None, stop: str | None = None, code: int = 0, log: Path = Path("none")
) -> Verdict:
    return judge({state.rank: state for state in states}, CONFIG, problem, stop, code, log)


def test_done_is_done_also_when_a_stop_came_last() -> None:
    assert judged(rank(0, "done"), rank(1, "done")).reason == "done"
    assert judged(rank(0, "done"), rank(1, "done"), stop="preempted").reason == "done"


def test_a_stop_that_all_ranks_followed_is_no_fault() -> None:
    verdict = judged(rank(0, "stopped"), rank(1, "stopped"), stop="time limit")
    assert (verdict.reason, verdict.healthy, verdict.exit_code, verdict.saved) == ("time limit", True, 75, True)


@pytest.mark.parametrize("other", ["refused", "stopped", None])
def test_a_refusal_stays_one_also_while_the_run_is_asked_to_stop(other: str | None) -> None:
    """Taken for a stop, a run that can never start is requeued, and refused again, each time it is preempted."""
    verdict = judged(rank(0, "refused", "no such key"), rank(1, other), stop="preempted", code=2)
    assert (verdict.reason, verdict.detail, verdict.exit_code, verdict.healthy) == ("refused", "no such key", 2, False)


@pytest.mark.parametrize("reason", ["preempted", "time limit", "stopped", "memory"])
def test_a_run_that_goes_on_later_has_not_failed(reason: str) -> None:
    """Else a node that is short of memory now and then would use up faults.max_restarts."""
    verdict = judged(rank(0, "stopped"), rank(1, "stopped"), stop=reason)
    assert verdict.healthy and verdict.exit_code == 75


def test_a_stop_that_was_cut_short_is_told_and_no_fault_either() -> None:
    verdict = judged(rank(0, "stopped"), rank(1, None, lost=True), stop="preempted", code=137)
    assert verdict.healthy and not verdict.saved
    assert "before all ranks had stopped" in verdict.line(3)


def test_an_error_during_a_stop_is_a_failure() -> None:
    verdict = judged(rank(0, "failed", "OSError: disk full"), rank(1, "stopped"), stop="preempted", code=1)
    assert (verdict.reason, verdict.healthy) == ("failed", False)


def test_a_step_that_the_supervisor_ended_has_failed_also_while_it_stopped() -> None:
    """A rank that hangs while all stop is a fault: taken for a stop that was cut short, it would be tried for ever."""
    verdict = judged(rank(0, "stopped"), rank(1, None, lost=True), problem="rank 1 hangs", stop="preempted", code=137)
    assert (verdict.reason, verdict.detail, verdict.healthy) == ("failed", "rank 1 hangs", False)


def test_a_missing_rank_is_not_done() -> None:
    assert judged(rank(0, "done"), code=0).reason == "failed"


def test_a_stop_before_all_ranks_have_reported_has_saved_nothing() -> None:
    for reported in ((), (rank(0, "stopped"),)):
        verdict = judged(*reported, stop="preempted", code=143)
        assert (verdict.reason, verdict.healthy, verdict.saved) == ("preempted", True, False)


def test_a_refusal_goes_before_the_failures_that_follow_from_it() -> None:
    verdict = judged(rank(0, "failed", "RuntimeError: gloo: connection reset"), rank(1, "refused", "no such key"))
    assert (verdict.reason, verdict.detail, verdict.exit_code) == ("refused", "no such key", 2)


def test_the_rank_that_failed_first_is_named_with_its_node() -> None:
    first = rank(1, "failed", "ZeroDivisionError: x", ended_at=1.0)
    assert judged(rank(0, None, lost=True, ended_at=1.5), first).detail == "rank 1 on n2: ZeroDivisionError: x"


def test_of_two_at_the_same_time_the_one_that_was_killed_is_the_cause() -> None:
    verdict = judged(rank(0, "failed", "KeyError: x"), rank(1, None, lost=True))
    assert verdict.detail.startswith("rank 1 on n2 was killed")


def test_an_error_about_another_rank_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "srun.log"
    log.write_text("srun: error: n2: task 1: Out Of Memory\nslurmstepd-n2: error: x\n")
    told = rank(0, "failed", "RuntimeError: [gloo] Connection closed by peer", ended_at=1.0)
    verdict = judged(told, rank(1, None, lost=True, ended_at=1.2), code=137, log=log)
    assert verdict.detail.startswith("rank 1 on n2 was killed (Out Of Memory)")


@pytest.mark.parametrize(
    "how", ["Segmentation fault", "Bus error", "Illegal instruction", "Floating point exception", "Aborted"]
)
def test_a_crash_is_not_called_a_kill(tmp_path: Path, how: str) -> None:
    log = tmp_path / "srun.log"
    log.write_text(f"srun: error: n2: task 1: {how} (core dumped)\n")
    verdict = judged(rank(0, None), rank(1, None, lost=True), code=139, log=log)
    assert verdict.detail == f"rank 1 on n2 crashed ({how} (core dumped))"


def test_without_any_rank_srun_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "srun.log"
    log.write_text("srun: error: n2: task 1: Terminated\nsrun: error: n1: task 0: Killed\n")
    assert judged(code=137, log=log).detail == "rank 0 on n1 was killed or ended before it was up (Killed)"
    log.write_text("srun: error: n2: task 1: Out Of Memory\nsrun: error: n1: task 0: Killed\n")
    assert judged(code=137, log=log).detail == "rank 1 on n2 was killed or ended before it was up (Out Of Memory)"
    log.write_text("srun: error: Unable to create step for job 7: Invalid account\n")
    assert "Invalid account" in judged(code=1, log=log).detail
    assert judged(code=5).detail == "srun ended with exit code 5"


def test_the_first_to_go_is_named_also_where_it_never_came_up(tmp_path: Path) -> None:
    log = tmp_path / "srun.log"
    log.write_text("srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Killed\n")
    up = rank(1, None, lost=True)
    assert judged(up, code=137, log=log).detail == "rank 0 on n1 was killed or ended before it was up (Killed)"
    log.write_text("srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed\n")
    assert judged(up, code=137, log=log).detail.startswith("rank 1 on n2 was killed (Killed)")
    failed = rank(1, "failed", "ZeroDivisionError: x")
    log.write_text("srun: error: n1: task 0: Killed\n")
    assert judged(failed, code=1, log=log).detail == "rank 1 on n2: ZeroDivisionError: x"


def test_what_the_watcher_saw_goes_before_what_followed() -> None:
    verdict = judged(rank(0, None, lost=True), problem="rank 1 on n2 hangs in 'update' for 900 s")
    assert verdict.detail == "rank 1 on n2 hangs in 'update' for 900 s"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "run")}}))
    return made


def attempt(run: RunDir, reason: str, reached: tuple[int, int] | None) -> None:
    with run.lock():
        run.new_attempt(loader.load(run.config)).finish(reason, 1, "", reached)


def test_failures_count_from_the_attempt_that_came_furthest(run: RunDir) -> None:
    assert failures_without_progress(run) == 0
    attempt(run, "failed", (3, 0))
    assert failures_without_progress(run) == 1
    attempt(run, "preempted", (3, 0))
    attempt(run, "failed", (2, 5))  # behind: it went back to a checkpoint
    assert failures_without_progress(run) == 2
    attempt(run, "failed", (3, 4))  # the same step, but some groups of its rollout more
    assert failures_without_progress(run) == 1
    attempt(run, "preempted", (9, 0))
    assert failures_without_progress(run) == 0
    for _ in range(50):
        attempt(run, "preempted", (9, 0))
        attempt(run, "time limit", (9, 0))
    assert failures_without_progress(run) == 0


def test_failures_of_another_config_do_not_count(tmp_path: Path) -> None:
    first = loader.from_dict({"run": {"dir": str(tmp_path / "run")}})
    run, _ = open_run(first)
    for _ in range(3):
        attempt(run, "failed", (0, 7))
    open_run(loader.with_settings(first, ["run.seed=7"]))
    assert failures_without_progress(run) == 0
    attempt(run, "failed", (-1, 0))
    assert failures_without_progress(run) == 1


def test_a_writer_that_was_killed_before_its_header_takes_no_group_from_the_others(run: RunDir) -> None:
    """Counted as one less, a run that goes on would seem to stand, and give up after faults.max_restarts."""
    folder = run.rollouts / "000002"
    folder.mkdir(parents=True)
    (folder / "rank-0000.journal").write_text("")
    assert newest_rollout(run) == (2, 0) and finished_groups(run, 2) == 0
    (folder / "rank-0001.journal").write_text("header\na\nb\n")
    (folder / "rank-0002.journal").write_text("hea")
    assert progress(run) == (-1, 2) and finished_groups(run, 2) == 2


def test_progress_is_steps_and_groups(run: RunDir) -> None:
    assert progress(run) == (-1, 0)
    run.append_metrics({"step": 4})
    folder = run.rollouts / "000002"
    folder.mkdir()
    (folder / "rank-0000.journal").write_text("header\na\nb\n")
    (folder / "rank-0001.journal").write_text("header\nc\ntorn")
    assert progress(run) == (4, 3)
