"""slurmctld is killed and restarted while a run is submitted, runs and is requeued: no job is doubled or lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm import submit as submit_module
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

Submit = Callable[..., SlurmRun]


@pytest.mark.timeout(600)
def test_the_controller_is_restarted(cluster: Cluster, submit: Submit, undisturbed: SlurmRun) -> None:
    cluster.stop_controller()
    later = threading.Timer(15.0, cluster.start_controller)  # longer than sbatch waits
    later.start()
    run = submit(grader_seconds=0.5)  # a rollout must last longer than the controller is away
    later.join()
    comment = json.loads((run.run_dir / "jobs" / "0001" / "job.json").read_text())["comment"]
    assert [job_id for job_id, theirs in commands.own_jobs() if theirs == comment] == [run.job_id]

    run.wait_for("rollout 0", in_rollout(run, 0))
    cluster.stop_controller()
    time.sleep(3.0)
    cluster.start_controller()

    run.wait_for("rollout 1", in_rollout(run, 1))
    cluster.stop_controller()
    run.kill(1, 10)  # SIGUSR1: the ranks save, and the job asks for a requeue that nobody hears at first
    time.sleep(8.0)
    cluster.start_controller()
    run.wait_until_ended()
    ends = [(record["reason"], record["detail"]) for record in run.attempts()]
    assert ends == [("stopped", ""), ("done", "")]
    assert_equal(run, undisturbed)


@pytest.mark.timeout(120)
def test_a_run_that_slurm_does_not_take_leaves_nothing(
    cluster: Cluster,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twenty seconds: sbatch refuses, and the controller is away. It would catch a run directory without a job."""
    monkeypatch.chdir(harness.PROJECT)
    monkeypatch.setattr(submit_module, "PATIENCE", 1.0)  # in place of a minute
    own = (str(tiny_config), *harness.OVERRIDES)
    sweep = ("--array", "run.seed=1,2,3")

    def refused(*more: str) -> str:
        assert main(["submit", *own, f"run.dir={tmp_path / 'run'}", *more]) == 2
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().err

    for more in ((), sweep):
        said = refused("slurm.partition=nope", *more)
        assert said.count("\n") == 1 and "Invalid partition name specified" in said, said
    cluster.stop_controller()
    try:
        for more in ((), sweep):
            said = refused(*more)
            *waits, fix, last = said.splitlines()  # of which the first is said if there is time for another question
            assert fix.startswith("error: Slurm's controller does not answer: give the command again"), said
            assert "Unable to contact slurm controller" in last, said
            assert waits in ([], ["Slurm's controller does not answer: trying again for 1 s"]), said
    finally:
        cluster.start_controller()
