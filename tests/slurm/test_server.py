"""Nodes of their own for engines, on a real Slurm.

Costs about a minute and a half. It would catch ranks that take the wrong role on their node, a job that asks for too
few of them, and a node of engines whose loss the run does not survive bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gspo_hpc.launch.slurm import commands
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

Submit = Callable[..., SlurmRun]
APART = ("cluster.nodes=3", "cluster.generation_nodes=1", "rollout.mode=server")


@pytest.mark.timeout(600)
def test_the_node_that_generates_is_lost(cluster: Cluster, submit: Submit, undisturbed: SlurmRun) -> None:
    """Two nodes train and a third one generates: as two that do both, also when the third is lost in a rollout."""
    run = submit(*APART)
    run.wait_for("rollout 1", in_rollout(run, 1))
    assert len(run.workers()) == 3 and len(harness.engine_cores(run)) == 1
    lost = commands.hostnames(commands.job(run.job_id).nodes)[2]  # type: ignore[union-attr]
    cluster.lose(lost)
    try:
        run.wait_for("the second start", lambda: len(run.attempts()) == 2 and run.state().name == "RUNNING")
        assert lost not in commands.hostnames(commands.job(run.job_id).nodes)  # type: ignore[union-attr]
        run.wait_until_ended()
    finally:
        cluster.revive(lost)
    assert [record["reason"] for record in run.attempts()] == ["failed", "done"], run.attempts()
    assert_equal(run, undisturbed)
