"""Preempted, requeued, out of time: the run ends as the one that nothing happened to, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from gspo_hpc.launch.slurm import commands
from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun

Submit = Callable[..., SlurmRun]


def assert_equal(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """EQ: metrics, samples, final weights; every step once; one W&B run; nothing left behind."""
    steps = [record["step"] for record in runs.metrics(run.run_dir)]
    assert steps == list(range(harness.STEPS + 1))
    failures = [line for line in run.log(0).splitlines() if "a reward function failed" in line]
    assert not failures, "graders that were ended with a job have not failed"
    assert runs.comparable(run.run_dir) == runs.comparable(undisturbed.run_dir)
    assert runs.samples(run.run_dir) == runs.samples(undisturbed.run_dir)
    assert harness.final_state(run) == harness.final_state(undisturbed)
    assert len({path.name.rsplit("-", 1)[1] for path in run.run_dir.glob("wandb/offline-run-*")}) == 1
    assert harness.processes_of(run.run_dir) == []
    assert runs.left_on_node(run.run_dir) == []


def in_rollout(run: SlurmRun, number: int) -> Callable[[], bool]:
    """Some groups of a rollout are finished, others are not."""
    return lambda: 0 < runs.journal_lines(run.run_dir, number) < harness.GROUPS


@pytest.mark.timeout(1500)
def test_preempted_again_and_again(cluster: Cluster, submit: Submit, undisturbed: SlurmRun) -> None:
    """In a rollout with the user signal at once; in one with SIGTERM only; by `scontrol requeue`, without warning; and
    between the two updates of a rollout by a signal that reaches rank 1 alone, while rank 0 may be in a collective."""
    run = submit()
    cluster.user_signal(True)
    run.wait_for("rollout 0", in_rollout(run, 0))
    cluster.preempt()
    run.wait_for("the second start", lambda: len(run.attempts()) == 2)
    cluster.user_signal(False)
    run.wait_for("rollout 1", in_rollout(run, 1))
    cluster.preempt()
    run.wait_for("the third start", lambda: len(run.attempts()) == 3)
    run.wait_for("rollout 2", in_rollout(run, 2))
    commands.requeue(run.job_id)
    run.wait_for("the fourth start", lambda: len(run.attempts()) == 4)
    for step in (5, 7):  # a machine that stood still may let the second update begin: then in the next rollout
        run.wait_for("between two updates", lambda step=step: run.last_step() >= step)
        run.kill(1, signal.SIGUSR2)
        starts = len(run.attempts())
        run.wait_for("the next start", lambda starts=starts: len(run.attempts()) > starts)
        if (reached := run.attempts()[starts - 1]["reached"])[0] == step:
            break
    assert reached[0] == step, "the signal came too late"
    run.wait_until_ended()
    attempts = run.attempts()
    assert [record["reason"] for record in attempts[:2]] == ["preempted", "preempted"], attempts
    assert attempts[-1]["reason"] == "done" and len({record["slurm_job_id"] for record in attempts}) == 1, attempts
    assert "failed" not in {record["reason"] for record in attempts}, attempts
    # No finished group is made again: what was in the journal at a preemption is what the next start began with.
    assert attempts[0]["reached"][1] > 0
    assert_equal(run, undisturbed)


@pytest.mark.timeout(600)
def test_out_of_time(submit: Submit, undisturbed: SlurmRun) -> None:
    """The time limit comes in two of three jobs of the chain: together they make the steps of one."""
    # Each of the four rollouts takes half as long as the limit lets the run go on.
    run = submit("slurm.time_minutes=30", "slurm.signal_seconds=10", grader_seconds=1.6)
    for number in (1, 2):
        run.wait_for(f"start {number}", lambda number=number: len(run.attempts()) == number and bool(run.workers()))
        groups = run.groups()
        run.wait_for("work", lambda groups=groups: run.groups() != groups)
        set_limit(run, f"EndTime={datetime.now() + timedelta(seconds=harness.NOTICE):%Y-%m-%dT%H:%M:%S}")
        started = len(run.attempts())
        run.wait_for("the next start", lambda started=started: len(run.attempts()) > started)
        set_limit(run, "TimeLimit=30")
    run.wait_until_ended()
    attempts = run.attempts()
    assert [record["reason"] for record in attempts] == ["time limit", "time limit", "done"], attempts
    assert [record["reached"][0] for record in attempts] == sorted(record["reached"][0] for record in attempts)
    assert_equal(run, undisturbed)


def set_limit(run: SlurmRun, word: str) -> None:
    """Another time limit, as an administrator may set it: shorter than the whole minutes of --time."""
    commands.run(["scontrol", "update", f"JobId={run.job_id}", word])
