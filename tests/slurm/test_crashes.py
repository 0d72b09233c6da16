"""Ranks and engines that are killed or hang, nodes that are lost, a controller that restarts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from gspo_hpc.launch.slurm import commands
from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

Submit = Callable[..., SlurmRun]


@pytest.mark.timeout(900)
def test_killed_and_hanging_ranks_and_engines(submit: Submit, undisturbed: SlurmRun) -> None:
    """kill -9 of a rank, kill -9 of an engine, SIGSTOP of a rank: each mended within the allocation."""
    run = submit()
    run.wait_for("rollout 0", in_rollout(run, 0))
    first = run.workers()
    run.kill(1)
    began = time.monotonic()
    run.wait_for("the end of the step", lambda: not set(run.workers().values()) & set(first.values()))
    assert time.monotonic() - began < 10.0
    run.wait_for("the start of rollout 1", (run.run_dir / "rollouts" / "000001").exists)
    engine = harness.engine_cores(run)[0]
    os.kill(engine, signal.SIGSTOP)  # with work in hand, however slow this test is to kill it
    run.wait_for("rollout 1", in_rollout(run, 1))
    os.kill(engine, signal.SIGKILL)
    run.wait_for("rollout 2", in_rollout(run, 2))
    run.kill(1, signal.SIGSTOP)
    run.wait_until_ended()
    attempts = run.attempts()
    assert [record["reason"] for record in attempts] == ["failed", "failed", "done"], attempts
    assert "rank 1 on" in attempts[0]["detail"] and "killed" in attempts[0]["detail"]
    assert "rank 1 on" in attempts[1]["detail"] and "not been heard of for 15 s" in attempts[1]["detail"]
    assert len({record["slurm_job_id"] for record in attempts}) == 1
    for before, after in pairwise(attempts):
        pause = datetime.fromisoformat(after["started"]) - datetime.fromisoformat(before["ended"])
        assert pause.total_seconds() < 30.0, "a restart in the allocation is to begin at once"
    for rank in (0, 1):
        stacks = (run.run_dir / "attempts" / "0002" / f"rank-{rank}.stacks").read_text()
        assert "Fatal Python error: Aborted" in stacks and "most recent call first" in stacks, (rank, stacks[:2000])
        assert f"{run.run_dir}/jobs/0001/code.zip/gspo_hpc/training/worker.py" in stacks, (
            "not the code that was submitted"
        )
    told = run.command("logs", str(run.run_dir), "--errors", "--attempt", "2").stdout
    assert "rank-1.stacks" in told and "most recent call first" in told, told
    assert not list((run.run_dir / "attempts" / "0003").glob("*.stacks")), "left by ranks that were done"
    restarts = [record["engine_restarts"] for record in runs.metrics(run.run_dir) if "engine_restarts" in record]
    assert max(restarts) == 1
    assert_equal(run, undisturbed)
    _, found = runs.diagnose(run.run_dir)
    for name, evidence in {
        "killed_rank": "attempt 1: rank 1 on",
        "hanging_rank": "attempt 2: rank 1 on",
        "engine_restarts": "1 restart in place",
        "restarts": "3 attempts: 2 failed",
    }.items():
        assert found[name]["severity"] == "warning" and found[name]["evidence"][0].startswith(evidence), found[name]


@pytest.mark.timeout(600)
def test_preempted_without_grace_and_a_lost_node(cluster: Cluster, submit: Submit, undisturbed: SlurmRun) -> None:
    """Killed within seconds by a job of higher priority; then slurmd and all that runs under it are killed."""
    run = submit("slurm.partition=low-now")
    run.wait_for("rollout 0", in_rollout(run, 0))
    cluster.preempt()
    run.wait_for("the second start", lambda: len(run.attempts()) == 2)
    run.wait_for("rollout 1", in_rollout(run, 1))
    lost = commands.hostnames(commands.job(run.job_id).nodes)[1]  # type: ignore[union-attr]
    cluster.lose(lost)
    try:
        run.wait_for("the third start", lambda: len(run.attempts()) == 3 and run.state().name == "RUNNING")
        nodes = commands.hostnames(commands.job(run.job_id).nodes)  # type: ignore[union-attr]
        assert lost not in nodes
        run.wait_until_ended()
    finally:
        cluster.revive(lost)
    reasons = [record["reason"] for record in run.attempts()]
    assert reasons[0] != "failed" and reasons[1:] == ["failed", "done"], reasons
    assert_equal(run, undisturbed)
    _, found = runs.diagnose(run.run_dir)
    assert found["lost_node"]["severity"] == found["restarts"]["severity"] == "warning", found
    assert any(lost in text for text in found["lost_node"]["evidence"]), found["lost_node"]
    assert found["lost_node"]["settings"] == [f"slurm.exclude={lost}"]


@pytest.mark.timeout(300)
def test_a_crash_loop_ends(submit: Submit, tmp_path: Path) -> None:
    """An error, and then process groups that never end; a killed supervisor; a killed rank: without progress all count
    alike, and the run is given up, with the reason, and the nodes are free."""
    note = tmp_path / "planted"
    run = submit("faults.max_restarts=2", shell=runs.planted("error", note))
    run.wait_for("a start after the error", lambda: len(run.attempts()) == 2 and 0 in run.workers())
    os.kill(run.supervisor(), signal.SIGKILL)
    run.wait_for("a start after the supervisor", lambda: len(run.attempts()) == 3 and 0 in run.workers())
    run.kill(0)
    began = time.monotonic()
    run.wait_until_ended("FAILED", timeout=60)
    assert time.monotonic() - began < 15.0
    assert "gives up: 3 failures without progress" in run.log()
    first, second, third = run.attempts()
    assert {record["reason"] for record in (first, second, third)} == {"failed"}
    assert first["detail"].startswith("rank 1 on n") and first["detail"].endswith(": RuntimeError: the planted one")
    assert datetime.fromisoformat(first["ended"]).timestamp() - note.stat().st_mtime < 30.0
    assert second["detail"].startswith("signal 9 ended the supervisor on n"), second
    told = run.command("status", str(run.run_dir)).stdout
    assert "failed" in told and "rank 0 on" in told, told
    assert harness.processes_of(run.run_dir) == []
    code, found = runs.diagnose(run.run_dir)
    assert code == 1 and found["killed_rank"]["severity"] == found["crash_loop"]["severity"] == "problem", found
    assert "gives up: 3 failures without progress" in found["crash_loop"]["evidence"][-1]


@pytest.mark.timeout(300)
def test_a_rank_that_does_not_come_up_is_named(submit: Submit) -> None:
    """A rank that hangs before it can say a word."""
    run = submit("faults.bringup_timeout=10", "faults.max_restarts=0")
    run.wait_for("rank 1", lambda: 1 in run.workers())
    run.kill(1, signal.SIGSTOP)
    run.wait_until_ended("FAILED", timeout=60)
    detail = run.attempts()[0]["detail"]
    assert "rank 1 on" in detail, detail
    code, found = runs.diagnose(run.run_dir)
    assert code == 1 and found["hanging_rank"]["settings"] == ["faults.bringup_timeout=30"], found
