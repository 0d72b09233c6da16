"""When a supervisor asks its ranks to stop, what it does after an attempt, and what the next one makes of its death.

Eight seconds. Small programs answer in the place of Slurm's commands. It would catch a deadline that counts from the
start of a supervisor, a job that goes on after more failures than it may have, one that is requeued for how it ended
before Slurm had started it again, ranks that are stopped too late or are not told when they will be killed, and an
attempt whose end waits for a controller that is away, or for a process that SIGKILL does not end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands, ending, srun, supervisor, takeover
from gspo_hpc.launch.verdict import Verdict
from gspo_hpc.launch.watch import LINGER
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system.control import RankState
from gspo_hpc.system.exit_codes import FAILED, REQUEUE
from gspo_hpc.system.signals import MEMORY, StopFlag, signals_default_in_children
from tests.immortal import immortal

JOB = "JobId=7 JobState=RUNNING Restarts=0 EndTime="
NOTICE = 600.0  # slurm.signal_seconds


class Slurm:
    """Slurm's commands, as programs in front of the real ones."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        patch.setenv("PATH", str(folder), prepend=":")
        for name in ("squeue", "sinfo", "srun"):
            self._say(name, "exit 0")
        self._say("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    def ends_in(self, seconds: float) -> None:
        """Have Slurm end the job so many seconds from now; it also notes what else it is asked."""
        text = JOB + datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds")
        self._say(
            "scontrol", f'case "$*" in show\\ job*) echo "{text}" ;; *) echo "$*" >> {self._folder}/asked ;; esac'
        )

    def lists_steps(self, looks: int, count: Path) -> None:
        """Have a step run for the first looks, which are counted in a file."""
        self._say("squeue", f'echo look >> {count}; [ "$(wc -l < {count})" -gt {looks} ] || echo 7.0')

    def answers_late(self, seconds: float) -> None:
        self._say("scontrol", f"exec sleep {seconds}")

    def answers_nothing(self) -> None:
        self._say("scontrol", "echo 'Access denied' >&2; exit 1")

    def asked(self) -> list[str]:
        path = self._folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def _say(self, name: str, body: str) -> None:
        (self._folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (self._folder / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "n1"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("GSPO_HPC_JOB_BEGAN", raising=False)
    (tmp_path / "bin").mkdir()
    return Slurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return loader.from_dict(
        {
            "run": {"dir": str(tmp_path / "run")},
            "slurm": {"time_minutes": 90, "signal_seconds": NOTICE},
            "faults": {"max_restarts": 2},
        }
    )


@pytest.fixture
def run(config: Config) -> RunDir:
    return open_run(config)[0]


Watch = Callable[[], supervisor._Attempt]


@pytest.fixture
def watch(config: Config, run: RunDir, tmp_path: Path) -> Iterator[Watch]:
    """Returns a function that makes what watches an attempt which starts now."""
    made: list[supervisor._Attempt] = []

    def start() -> supervisor._Attempt:
        with run.lock():
            attempt = run.new_attempt(config)
        made.append(supervisor._Attempt(config, run, attempt, tmp_path, "7", StopFlag()))
        return made[-1]

    yield start
    for one in made:
        one.server.close()


def test_an_attempt_that_starts_late_stops_before_the_end_of_the_allocation(slurm: Slurm, watch: Watch) -> None:
    slurm.ends_in(NOTICE + 100)
    late = watch()
    late._stop_if_due()
    assert late.stop is None
    slurm.ends_in(NOTICE - 100)
    late = watch()
    late._stop_if_due()
    assert late.stop == "time limit" and late._left() == pytest.approx(NOTICE - 100, abs=3)
    late._stop_if_due()
    assert slurm.asked() == [], "there is time to save"
    late.end_time = time.time() + 5
    late._stop_if_due()
    assert slurm.asked() == ["requeue 7"], "saved or not"


@pytest.mark.parametrize(("since", "asked"), [("0", ["requeue 7"]), ("1", [])])
def test_a_job_that_slurm_has_started_again_is_not_requeued(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, since: str, asked: list[str]
) -> None:
    """Slurm tells another number of restarts than the one with which this process began: the job is another's now."""
    slurm.ends_in(3600)
    monkeypatch.setenv("SLURM_RESTART_COUNT", since)
    ending.requeue_now("7", patience=1.0)
    assert slurm.asked() == asked


@pytest.mark.parametrize(
    ("save", "margin", "stops"), [(400.0, 700.0, True), (400.0, 900.0, False), (1.0, 650.0, False)]
)
def test_a_run_whose_saves_take_long_stops_twice_as_long_before_the_end(
    save: float, margin: float, stops: bool, slurm: Slurm, watch: Watch
) -> None:
    """The step that goes on may end with a save, and then the stop saves."""
    slurm.ends_in(margin)
    attempt = watch()
    state = RankState(0, "n1", 1, "", time.monotonic(), time.monotonic())
    state.save_seconds = save
    attempt.server.ranks[0] = state
    attempt._stop_if_due()
    assert (attempt.stop == "time limit") == stops


@pytest.mark.parametrize("cancelled", [False, True])
def test_ranks_are_told_when_they_will_be_killed(
    cancelled: bool, slurm: Slurm, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give up a save that cannot end by then; who cancels a run has no deadline."""
    slurm.ends_in(NOTICE - 100)
    attempt, told = watch(), list[tuple[str, float | None]]()
    monkeypatch.setattr(attempt.server, "stop", lambda reason, deadline: told.append((reason, deadline)))
    if cancelled:
        (tmp_path / srun.CANCEL).touch()
    attempt._stop_if_due()
    ((reason, deadline),) = told
    if cancelled:
        assert (reason, deadline) == ("cancelled", None)
    else:
        assert reason == "time limit" and deadline == pytest.approx(time.time() + NOTICE - 100, abs=3)


def test_the_limit_may_be_raised_while_the_job_runs(slurm: Slurm, watch: Watch) -> None:
    slurm.ends_in(NOTICE - 100)
    attempt = watch()
    slurm.ends_in(NOTICE + 1000)
    attempt._stop_if_due()
    assert attempt.stop is None and attempt._left() == pytest.approx(NOTICE + 1000, abs=3)


@pytest.mark.parametrize(("left", "why"), [(NOTICE + 30, "time limit"), (NOTICE + 90, "stopped")])
def test_a_signal_a_little_before_the_notice_is_that_of_the_time_limit(
    left: float, why: str, slurm: Slurm, watch: Watch
) -> None:
    """Slurm sends it up to a minute early; called "stopped", such a job would not be taken for one out of time."""
    slurm.ends_in(left)
    attempt = watch()
    assert attempt._why(attempt._job(), False) == why


@pytest.mark.parametrize(("preempted", "why"), [(900.0, "stopped"), (1000.0, "preempted"), (1100.0, "preempted")])
def test_a_preemption_before_the_job_was_started_again_is_none(watch: Watch, preempted: float, why: str) -> None:
    """Slurm keeps the time of the last one through a requeue."""
    job = commands.Job("7", "RUNNING", "", "n1", 1000.0, time.time() + 7200.0, preempted, 1, "")
    assert watch()._why(job, False) == why


def test_time_in_which_this_process_was_suspended_does_not_count(
    slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended job (scontrol suspend) has its ranks stand still: they are not late when it goes on."""
    slurm.ends_in(NOTICE + 1000)
    one, clock = watch(), iter([100.0, 101.0, 1001.0, 1002.0])  # of the start, and of each look
    one.server.ranks[0] = RankState(0, "n1", 1, "7.0", heard_at=100.0, moved_at=100.0)
    seen: list[tuple[float, ...]] = []

    def problem(ranks: Any, config: Config, now: float, began: float, node: Any) -> None:
        seen.append((now - began, now - ranks[0].heard_at, now - ranks[0].moved_at))

    looks = iter([None, None, None])
    step: Any = SimpleNamespace(poll=lambda: next(looks, 0))
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    monkeypatch.setattr(supervisor.watch, "problem", problem)
    monkeypatch.setattr(one, "_stop_if_due", lambda: None)
    assert one._watch(step) is None
    assert seen == [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (2.0, 1.0, 1.0)]


@pytest.mark.parametrize(("other", "stop"), [(f"{MEMORY}: it creeps", MEMORY), ("SIGTERM", "stopped")])
def test_a_signal_to_one_rank_is_not_the_memory_that_another_lacks(
    slurm: Slurm, watch: Watch, other: str, stop: str
) -> None:
    """Ranks that stop for memory alone start again in the allocation; a signal may mean that it ends."""
    slurm.ends_in(NOTICE + 1000)
    one = watch()
    for rank, got in enumerate((f"{MEMORY}: it creeps", other)):
        one.server.ranks[rank] = RankState(rank, "n1", 1, "7.0", heard_at=0.0, moved_at=0.0, signal=got)
    one._stop_if_due()
    assert (one.stop, one.detail) == (stop, "it creeps" if stop == MEMORY else "")


def test_a_signal_to_the_job_is_not_the_memory_that_ranks_lack_at_the_same_time(slurm: Slurm, watch: Watch) -> None:
    slurm.ends_in(NOTICE + 1000)
    one = watch()
    one.server.ranks[0] = RankState(0, "n1", 1, "7.0", heard_at=0.0, moved_at=0.0, signal=f"{MEMORY}: it creeps")
    one.unholding = True  # a process that this test has no use for
    one.flag.request("SIGTERM")
    one._stop_if_due()
    assert (one.stop, one.detail) == ("stopped", "")


@pytest.mark.parametrize("names", [{"7.0"}, {"7.0", "7.1"}])
def test_a_stopped_rank_goes_on_before_it_is_to_write_its_stacks(
    names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(supervisor, "_STACKS", 0.0)
    monkeypatch.setattr(supervisor.commands, "signal_step", lambda step, name: sent.append(name))
    monkeypatch.setattr(supervisor.commands, "cancel", lambda step: sent.append("cancel"))
    supervisor._cancel_steps(names)
    assert sent == [one for one in ("CONT", "ABRT", "cancel") for _ in names]


def test_a_job_that_begins_while_submit_is_still_busy_waits_for_it(
    slurm: Slurm, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder without an attempt is about to go; one with an attempt of another job is not, and is refused at once."""
    monkeypatch.setattr(supervisor, "_LOCK_PATIENCE", 8.0)
    leaving = threading.Timer(2.0, run.lock().close)  # the lock itself waits a second
    leaving.start()
    with supervisor._patient_lock(run, "8") as held:
        held.describe(3)
        began = time.monotonic()
        with pytest.raises(ValueError, match="is running already"), supervisor._patient_lock(run, "8"):
            pass
        assert time.monotonic() - began < 5
    leaving.join()


def test_without_an_answer_of_slurm_the_deadline_is_that_of_the_allocation_too(
    slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers_nothing()
    for passed, stop in ((90 * 60 - NOTICE - 100, None), (90 * 60 - NOTICE + 100, "time limit")):
        monkeypatch.setenv("GSPO_HPC_JOB_BEGAN", f"{time.time() - passed:.0f}")
        attempt = watch()
        attempt._stop_if_due()
        assert attempt.stop == stop


def fail(run: RunDir, config: Config, reached: tuple[int, int] = (3, 0)) -> None:
    with run.lock():
        run.new_attempt(config).finish("failed", FAILED, "planted", reached)


def test_a_job_gives_up_after_as_many_failures_as_it_may_have(slurm: Slurm, run: RunDir, config: Config) -> None:
    verdict, flag = Verdict("failed", "planted", saved=False), StopFlag()
    for _ in range(config.faults.max_restarts):
        fail(run, config)
        assert supervisor._decide(verdict, config, run, flag) is None
    fail(run, config)
    assert supervisor._decide(verdict, config, run, flag) == supervisor._Last(FAILED)
    fail(run, config, (4, 0))  # a step further
    assert supervisor._decide(verdict, config, run, flag) is None


def test_a_run_that_stopped_for_memory_starts_again_in_the_same_allocation(
    slurm: Slurm, run: RunDir, config: Config
) -> None:
    """Memory is free again, and a wait in the queue would help nothing; but a job that is to end is requeued."""
    flag = StopFlag()
    assert supervisor._decide(Verdict(MEMORY, "planted"), config, run, flag) is None
    for reason in ("preempted", "time limit", "stopped"):
        assert supervisor._decide(Verdict(reason), config, run, flag) == supervisor._Last(REQUEUE, requeue=True)
    flag.request("SIGTERM")
    assert supervisor._decide(Verdict(MEMORY, "planted"), config, run, flag) == supervisor._Last(REQUEUE, requeue=True)


def test_a_failure_after_the_signal_of_the_job_goes_back_to_the_queue(
    slurm: Slurm, run: RunDir, config: Config
) -> None:
    """Ranks that fail while they stop would be started again in an allocation that ends within seconds."""
    verdict, flag = Verdict("failed", "planted", saved=False), StopFlag()
    fail(run, config)
    assert supervisor._decide(verdict, config, run, flag) is None
    flag.request("SIGUSR1")
    assert supervisor._decide(verdict, config, run, flag) == supervisor._Last(REQUEUE, requeue=True)


@pytest.mark.parametrize("looks", [0, 3])
def test_a_supervisor_that_takes_over_waits_for_the_ranks_and_forgets_the_death(
    looks: int, slurm: Slurm, run: RunDir, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of two attempts would write into one run; a supervisor that is killed later must tell its own death."""
    monkeypatch.setattr(takeover, "_POLL", 0.01)
    monkeypatch.setenv("GSPO_HPC_JOB_BEGAN", "0")
    monkeypatch.setenv("GSPO_HPC_KILLED", "137")
    swept: list[int] = []
    monkeypatch.setattr(takeover.leftovers, "sweep", lambda _, attempts: swept.extend(attempts))
    with run.lock():
        run.new_attempt(config)
    count, cancelled = tmp_path / "looks", tmp_path / "cancelled"
    slurm.lists_steps(looks, count)
    verdict = takeover.take_over(run, "7", StopFlag())
    assert verdict is not None and verdict.detail.startswith("signal 9 ended the supervisor")
    assert len(count.read_text().splitlines()) > looks, "it has looked until none was left"
    assert swept == [1], "what the attempt left in memory goes, too"
    assert not cancelled.exists() and "GSPO_HPC_KILLED" not in os.environ


def test_killed_supervisors_count_as_failures_of_ranks_do(
    slurm: Slurm, run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_HPC_JOB_BEGAN", str(int(time.time())))
    decisions = []
    for _ in range(config.faults.max_restarts + 1):
        with run.lock():
            run.new_attempt(config)
        monkeypatch.setenv("GSPO_HPC_KILLED", "137")
        verdict = takeover.take_over(run, "7", StopFlag())
        assert verdict is not None and (verdict.reason, verdict.saved) == ("failed", False)
        decisions.append(supervisor._decide(verdict, config, run, StopFlag()))
    assert decisions == [None, None, supervisor._Last(FAILED)]
    assert [one["reason"] for one in run.read_attempts()] == ["failed"] * 3


@pytest.mark.parametrize("before", [True, False], ids=["an earlier allocation", "this allocation"])
def test_an_end_counts_in_the_allocation_in_which_it_was(
    before: bool, slurm: Slurm, run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job keeps its number: what ended its last attempt must not send it back to the queue, again and again,
    where a supervisor is killed before it has started an attempt."""
    with run.lock():
        run.new_attempt(config).finish("preempted", REQUEUE, "", (3, 0))
    record = run.attempt(1).path / "attempt.json"
    began = datetime.fromisoformat(json.loads(record.read_text())["started"]).timestamp()
    monkeypatch.setenv("GSPO_HPC_JOB_BEGAN", f"{began + 60 * before:.0f}")
    monkeypatch.setenv("GSPO_HPC_KILLED", "137")
    verdict = takeover.take_over(run, "7", StopFlag())
    assert (verdict is None) == before
    assert verdict is None or supervisor._decide(verdict, config, run, StopFlag()) == supervisor._Last(REQUEUE, True)


@pytest.mark.parametrize("ignored", ["HUP", "TERM"])
def test_a_step_ends_also_where_neither_slurm_nor_a_request_ends_it(
    ignored: str, slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STACKS", 0.1)
    monkeypatch.setattr(supervisor, "_ENDING", 0.5)
    monkeypatch.setattr(supervisor, "_LEAVING", 0.5 if ignored == "TERM" else 2.0)
    attempt = watch()
    program = f"trap '' {ignored}; echo up; while :; do sleep 0.1; done"
    with signals_default_in_children():
        step = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE)
    with step:
        assert step.stdout is not None and step.stdout.readline() == b"up\n"
        attempt._end(step)
    assert step.returncode == (-signal.SIGKILL if ignored == "TERM" else -signal.SIGTERM)


def test_a_step_that_not_even_a_kill_ends_is_named_and_left(
    slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_STACKS", "_ENDING", "_LEAVING"):
        monkeypatch.setattr(supervisor, name, 0.1)
    attempt = watch()
    attempt.server.ranks[0] = failed(time.monotonic() - LINGER - 1)
    step = subprocess.Popen(["sleep", "100"])
    with step, immortal(step.pid):
        assert attempt._watch(step) == "rank 0 on n1: ValueError: planted"
    assert f"srun: process {step.pid} does not end, not even on SIGKILL; its state is Z" in capsys.readouterr().out


def failed(at: float) -> RankState:
    state = RankState(0, "n1", 1, "", at, at)
    state.outcome, state.detail, state.ended_at = "failed", "ValueError: planted", at
    return state


def test_a_controller_that_is_away_delays_no_stop(slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_ANSWER", 0.3)
    slurm.ends_in(NOTICE - 100)
    attempt = watch()
    slurm.answers_late(5)
    for stop, left in (("time limit", NOTICE - 100), ("time limit", 5)):
        began = time.monotonic()
        attempt._stop_if_due()
        assert attempt.stop == stop and time.monotonic() - began < 3
        assert attempt._left() == pytest.approx(left, abs=3)
        attempt.end_time = time.time() + 5
    assert attempt.requeued
    assert attempt._node(0) == "node 0 of n1"


class Clock:
    """A clock that only a wait for messages of ranks moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.monotonic = self.time = lambda: self.now
        self.sleep = lambda seconds: None  # of threads

    def poll(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("asks_at", [1.0, 9.9, 11.0, 13.0, 100.0])
def test_a_failure_ends_an_attempt_within_30_seconds(
    asks_at: float, slurm: Slurm, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever does not answer: the step, srun, the controller, which is asked so long after the failure."""
    parts = {
        "the others close what they have": LINGER,
        "an answer of Slurm": supervisor._ANSWER,
        "stacks": supervisor._STACKS,
        "Slurm ends the step": supervisor._ENDING,
        "srun gets SIGTERM, then SIGKILL": 2 * supervisor._LEAVING,
        "last messages": supervisor._SETTLE,
        "looks at the ranks": 4 * supervisor._POLL,
    }
    assert sum(parts.values()) <= 30
    clock, held = Clock(), threading.Event()
    attempt = watch()
    attempt.server.close()
    attempt.server = stub = SimpleNamespace(ranks={0: failed(clock.now)}, poll=clock.poll, stop=lambda *a: None)  # type: ignore[assignment]
    stub.close = lambda: None
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(commands, "job", lambda *a, **k: held.wait(20) and None)
    attempt.end_time = clock.now + NOTICE + asks_at
    step: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None, send_signal=lambda number: None)
    try:
        assert attempt._watch(step) == "rank 0 on n1: ValueError: planted"
    finally:
        held.set()
    assert clock.now - 1000.0 <= sum(parts.values())
    assert (attempt.stop is not None) == (asks_at < LINGER + supervisor._POLL)
