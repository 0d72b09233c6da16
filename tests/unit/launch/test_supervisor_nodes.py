"""Decisions of a supervisor on nodes, suspension, an earlier preemption, an ended job and a held lock (1 s).

It would catch a job that goes back to the queue with the node that does not answer, one whose ranks are taken for
hanging after all of them were suspended, one that is told preempted for a preemption before it began, one that starts
ranks although Slurm is ending it, one that is refused because submit has not quite ended, one of a single node that
listens to other machines, and a cancelled one that is requeued.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands, ending, srun, supervisor
from gspo_hpc.launch.verdict import Verdict
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system.control import RankState
from gspo_hpc.system.exit_codes import REQUEUE
from gspo_hpc.system.signals import StopFlag


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return loader.from_dict({"run": {"dir": str(tmp_path / "run")}, "faults": {"max_restarts": 2}})


@pytest.fixture
def run(config: Config) -> RunDir:
    return open_run(config)[0]


@pytest.fixture
def attempt(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[supervisor._Attempt]:
    monkeypatch.setattr(ending, "end_time", lambda *_, **__: None)
    with run.lock():
        begun = run.new_attempt(config)
    made = supervisor._Attempt(config, run, begun, tmp_path, "7", StopFlag())
    yield made
    made.server.close()


@pytest.mark.parametrize("dead", [[], ["n2"]])
def test_a_job_goes_back_to_the_queue_without_nodes_that_do_not_answer(
    dead: list[str], config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(commands, "hostnames", lambda _: ["n1", "n2"])
    monkeypatch.setattr(commands, "dead_nodes", lambda nodes: dead)
    last = supervisor._decide(Verdict("failed", "planted"), config, run, StopFlag())
    assert last == (supervisor._Last(REQUEUE, requeue=True, excluded=["n2"]) if dead else None)


@pytest.mark.parametrize(("running", "starts"), [(False, False), (True, True), (None, True)])
def test_a_supervisor_after_a_killed_one_starts_nothing_in_a_job_that_is_being_ended(
    running: bool | None, starts: bool, config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that ended the one before may be Slurm's. Without an answer of Slurm (None) it goes on."""

    def runs(job_id: str) -> bool:
        if running is None:
            raise commands.SlurmError("no answer")
        return running

    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setenv("GSPO_HPC_KILLED", "137")
    monkeypatch.setattr(supervisor, "take_over", lambda *_: None)
    monkeypatch.setattr(ending, "runs", runs)
    monkeypatch.setattr(ending, "wait_for_end", lambda _: None)
    monkeypatch.setattr(supervisor, "_Attempt", start)
    notices: Any = None  # of an attempt that has ended
    with run.lock() as lock:
        if starts:
            with pytest.raises(Started):
                supervisor._attempts(config, run, lock, tmp_path, "7", StopFlag(), notices)
        else:
            last = supervisor._attempts(config, run, lock, tmp_path, "7", StopFlag(), notices)
            assert last == supervisor._Last(REQUEUE) and run.read_attempts() == []


@pytest.mark.parametrize(("away", "heard"), [(3.0, False), (600.0, True)])
def test_ranks_that_were_suspended_with_their_supervisor_do_not_count_as_silent(
    away: float, heard: bool, attempt: supervisor._Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm suspends all processes of a job: that time is nobody's silence."""
    clock, silences, began = [1000.0], list[float](), list[float]()
    attempt.server.ranks[0] = RankState(0, "n1", 1, "", 1000.0, 1000.0)

    def polled(_: float) -> None:
        clock[0] += away

    def problem(ranks: dict[int, RankState], _: Config, now: float, since: float, *__: Any) -> str:
        silences.append(now - ranks[0].heard_at)
        began.append(now - since)
        return "seen"

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(attempt.server, "poll", polled)
    monkeypatch.setattr(supervisor.watch, "problem", problem)
    monkeypatch.setattr(attempt, "_stop_if_due", lambda: None)
    monkeypatch.setattr(attempt, "_end", lambda _: None)
    assert attempt._watch(SimpleNamespace(poll=lambda: None)) == "seen"  # type: ignore[arg-type]
    assert silences == began == [0.0 if heard else away]


@pytest.mark.parametrize(
    ("nodes", "node", "host"), [(1, "n1", "127.0.0.1"), (1, None, "127.0.0.1"), (2, "n1", "127.0.0.9")]
)
def test_ranks_of_one_node_reach_their_supervisor_without_the_network(
    nodes: int, node: str | None, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of one node listens to no other machine, and starts its ranks although Slurm's controller is away."""
    asked: list[str] = []

    def node_address(name: str) -> str:
        asked.append(name)
        return "127.0.0.9"

    monkeypatch.setattr(ending, "end_time", lambda *_, **__: None)
    monkeypatch.setattr(commands, "node_address", node_address)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if node is not None:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    config = loader.from_dict({"run": {"dir": str(tmp_path / "run")}, "cluster": {"nodes": nodes}})
    run = open_run(config)[0]
    with run.lock():
        begun = run.new_attempt(config)
    attempt = supervisor._Attempt(config, run, begun, tmp_path, "7", StopFlag())
    attempt.server.close()
    assert (attempt.server.host, asked) == (host, ["n1"] if nodes > 1 else [])


@pytest.mark.parametrize(("preempted", "why"), [(900.0, "stopped"), (1100.0, "preempted"), (None, "stopped")])
def test_a_preemption_of_an_earlier_start_is_not_that_of_this_one(
    preempted: float | None, why: str, attempt: supervisor._Attempt
) -> None:
    """Slurm tells the last preemption of a job, also after it has started again."""
    job = commands.Job("7", "RUNNING", "None", "n1", 1000.0, None, preempted, 1, "")
    assert attempt._why(job, False) == why


@pytest.mark.parametrize(
    ("told", "stops"),
    [("", True), ("srun: error: n1: task 1: Segmentation fault\n", False), ("srun: n1 is up\n", True)],
)
def test_a_signal_that_srun_sends_because_a_task_failed_is_no_request_to_stop(
    told: str, stops: bool, attempt: supervisor._Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that failed may not have been heard yet: called stopped, the attempt would not count as a failure."""
    monkeypatch.setattr(attempt, "_job", lambda: None)
    state = RankState(0, "n1", 1, "", time.monotonic(), time.monotonic())
    state.signal = "SIGTERM"
    attempt.server.ranks[0] = state
    attempt.log.write_text(told)
    attempt._stop_if_due()
    assert (attempt.stop == "stopped") == stops


@pytest.mark.parametrize(
    ("rank", "node"), [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2"), (4, "node 2 of n[1-2]"), (5, "node 2 of n[1-2]")]
)
def test_a_rank_that_has_not_reported_is_named_with_its_node(
    rank: int, node: str, attempt: supervisor._Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is where somebody has to look: ranks are dealt to nodes in blocks."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(commands, "hostnames", lambda _: ["n1", "n2"])
    attempt.config = loader.with_settings(attempt.config, ["cluster.nodes=2", "cluster.gpus_per_node=2"])
    assert attempt._node(rank) == node


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_cancelled_run_is_not_requeued_at_the_last_moment(
    cancelled: bool, attempt: supervisor._Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would start it again, for a user who has ended it; one that runs out of time goes back to the queue."""
    asked: list[str] = []
    monkeypatch.setattr(attempt, "_job", lambda: None)
    monkeypatch.setattr(ending, "requeue_now", lambda job_id, patience: asked.append(job_id))
    if cancelled:
        (tmp_path / srun.CANCEL).touch()
    attempt.end_time = time.time() + supervisor._LAST_MOMENT / 2
    for _ in range(3):
        attempt._stop_if_due()
    assert (attempt.stop, asked) == (("cancelled", []) if cancelled else ("time limit", ["7"]))


@pytest.mark.parametrize(
    ("holder", "waits"),
    [
        ({"slurm_job_id": None, "attempt": None}, True),  # submit, which is about to go
        ({"slurm_job_id": "7", "attempt": 3}, True),  # an earlier start of this job, on a node that was lost
        ({"slurm_job_id": "8", "attempt": 3}, False),
        ({"slurm_job_id": None, "attempt": 3}, False),  # a run on this machine
    ],
)
def test_the_lock_of_a_run_is_waited_for_where_its_holder_is_about_to_go(
    holder: dict[str, Any], waits: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, tries = RunDir.lock, list[int]()

    def locked(self: RunDir) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("held")
        return lock(self)

    monkeypatch.setattr(RunDir, "lock", locked)
    monkeypatch.setattr(RunDir, "holder", lambda _: holder)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    if waits:
        with supervisor._patient_lock(run, "7"):
            assert len(tries) == 3
        return
    with pytest.raises(ValueError, match="held"), supervisor._patient_lock(run, "7"):
        pass
    assert len(tries) == 1
