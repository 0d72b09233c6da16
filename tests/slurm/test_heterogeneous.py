"""A heterogeneous job on a real Slurm: nodes that generate with other GPUs than those that train.

Costs about a minute. It would catch ranks that a step over two components numbers in another way than the layout, a
signal or a requeue that reaches one component alone, and a run that does not go on from where it was.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gspo_hpc.launch.slurm import commands
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

Submit = Callable[..., SlurmRun]
# Two nodes with a rank each train, and a third one generates with two.
APART = (
    "cluster.nodes=3",
    "cluster.generation_nodes=1",
    "cluster.generation_gpus_per_node=2",
    "rollout.mode=server",
    "rollout.engines_per_node=2",
    "slurm.generation_partition=low",
    "slurm.generation_sbatch={mem: 0}",
)


@pytest.mark.timeout(600)
def test_a_preempted_heterogeneous_job_is_requeued_as_a_whole(
    cluster: Cluster, submit: Submit, undisturbed: SlurmRun
) -> None:
    """It is one job of three nodes, stops in a rollout, and ends equal to one of two nodes that do both."""
    run = submit(*APART)
    run.wait_for("rollout 1", in_rollout(run, 1))
    assert len(run.workers()) == 4 and len(harness.engine_cores(run)) == 2
    nodes = commands.hostnames(commands.job(run.job_id).nodes)  # type: ignore[union-attr]
    assert len(set(nodes)) == 3
    cluster.preempt()
    run.wait_for("the second start", lambda: len(run.attempts()) == 2 and run.state().name == "RUNNING")
    run.wait_until_ended()
    assert [record["reason"] for record in run.attempts()] == ["preempted", "done"], run.attempts()
    assert_equal(run, undisturbed)
