"""Preempted, out of time, requeued: the run ends as the one that nothing happened to, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun

Submit = Callable[..., SlurmRun]


def assert_equal(run: SlurmRun, undisturbed: SlurmRun, tmp_path: Path) -> None:
    """EQ: metrics, samples, final weights; every step once; one W&B run; nothing left behind."""
    steps = [record["step"] for record in runs.metrics(run.run_dir)]
    assert steps == list(range(harness.STEPS + 1))
    assert runs.comparable(run.run_dir) == runs.comparable(undisturbed.run_dir)
    assert runs.samples(run.run_dir) == runs.samples(undisturbed.run_dir)
    ours = runs.export(run.run_dir, tmp_path / "ours")
    theirs = runs.export(undisturbed.run_dir, tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert len({path.name.rsplit("-", 1)[1] for path in run.run_dir.glob("wandb/offline-run-*")}) == 1
    assert harness.processes_of(run.run_dir) == []


def in_rollout(run: SlurmRun, number: int) -> Callable[[], bool]:
    """Some groups of a rollout are finished, others are not."""
    return lambda: 0 < runs.journal_lines(run.run_dir, number) < 16


def test_preempted_in_a_rollout(cluster: Cluster, submit: Submit, undisturbed: SlurmRun, tmp_path: Path) -> None:
    """With the user signal at once, then with SIGTERM only, then between the two updates of a rollout."""
    run = submit()
    cluster.user_signal(True)
    run.wait_for("rollout 0", in_rollout(run, 0))
    cluster.preempt()
    run.wait_for("the second start", lambda: len(run.attempts()) == 2)
    cluster.user_signal(False)
    run.wait_for("rollout 1", in_rollout(run, 1))
    cluster.preempt()
    run.wait_for("the third start", lambda: len(run.attempts()) == 3)
    run.wait_for("between two updates", lambda: run.last_step() == 5)
    run.kill(1, 12)  # SIGUSR2 to rank 1 alone, while rank 0 may be in a collective
    run.wait_until_ended()
    reasons = [record["reason"] for record in run.attempts()]
    assert reasons[:2] == ["preempted", "preempted"] and reasons[-1] == "done", reasons
    assert_equal(run, undisturbed, tmp_path)
