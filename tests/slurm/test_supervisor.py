"""The supervisor itself is killed, as the kernel does when memory runs out, and memory creeps: the run goes on.

Four minutes on two busy cores beside the undisturbed run, most of them four starts of ranks and engines. It would catch
a job that ends with its supervisor, two sets of ranks that work at the same time, and a restart that Slurm counts as a
requeue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_hpc.launch.slurm import commands
from gspo_hpc.system.files import write_atomically
from tests.run import harness as runs
from tests.slurm.harness import SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

Submit = Callable[..., SlurmRun]


def memory(root: Path, used: float) -> None:
    """Let Linux tell of the nodes that so much of their memory is in use."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    write_atomically(root / "proc/meminfo", f"MemTotal: 1000000 kB\nMemAvailable: {1000000 * (1 - used):.0f} kB\n")
    (root / "proc/self/cgroup").touch()


@pytest.mark.timeout(900)
def test_killed_supervisors_and_memory_that_creeps(submit: Submit, undisturbed: SlurmRun, tmp_path: Path) -> None:
    """kill -9 of the supervisor in a rollout; more and more memory in use; then kill -9 of the supervisor, of srun and
    of a rank in one moment."""
    memory(tmp_path, 0.5)
    hooks = {"PYTHONPATH": str(Path(__file__).parent / "creeping"), "GSPO_HPC_TEST_ROOT": str(tmp_path)}
    run = submit("faults.restart_above_memory=0.9", shell=hooks)
    run.wait_for("rollout 0", in_rollout(run, 0))
    os.kill(run.supervisor(), signal.SIGKILL)
    run.wait_for("the second start", lambda: len(run.attempts()) == 2)
    run.wait_for("two steps, the first of them measured", lambda: run.last_step() >= 2)
    memory(tmp_path, 0.95)
    run.wait_for("the third start", lambda: len(run.attempts()) == 3)
    memory(tmp_path, 0.5)
    reached = run.last_step()
    run.wait_for("another step", lambda: run.last_step() > reached)
    for pid in (run.supervisor(), *run.processes("srun"), run.workers()[1]):
        os.kill(pid, signal.SIGKILL)
    run.wait_until_ended()
    attempts = run.attempts()
    assert [record["reason"] for record in attempts] == ["failed", "memory", "failed", "done"], attempts
    for record in (attempts[0], attempts[2]):
        assert record["detail"].startswith("signal 9 ended the supervisor on n"), record
        assert record["reached"], record
    assert attempts[1]["detail"].startswith("95% of the memory of n"), attempts[1]
    assert {record["slurm_job_id"] for record in attempts} == {run.job_id}
    job = commands.job(run.job_id)
    assert job is not None and job.restarts == 0, "the allocation is to be kept"
    assert_equal(run, undisturbed)
    _, found = runs.diagnose(run.run_dir)
    assert found["killed_supervisor"]["severity"] == "warning", found
