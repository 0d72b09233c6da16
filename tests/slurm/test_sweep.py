"""A sweep is one array of jobs: what happens to one task happens to no other, and each run ends as one alone would.

It took eight minutes where ten other programs wanted the two cores, most of them six starts of ranks and engines. It
would catch a task that requeues or ends the whole array, one that another's supervisor is taken for, a second
submission that doubles or forgets a run, and a task that does not resume from its own run directory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.launch.slurm import commands
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun
from tests.slurm.test_preemption import assert_equal, in_rollout

STEPS = (harness.STEPS, 2, 3)  # of the runs; the first is the undisturbed one


@pytest.fixture
def sweep(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> Iterator[SlurmRun]:
    """A sweep that is submitted as a run would be; what is left of it is cancelled at the end."""
    made = SlurmRun(tiny_config, tmp_path / "sweep", grader_seconds=0.3)
    yield made
    ids = {path.name.partition("_")[0] for path in made.run_dir.glob("jobs/*/*_submission.sh")}
    subprocess.run(["scancel", *ids], capture_output=True, check=False)


def submit(sweep: SlurmRun, steps: tuple[int, ...], *more: str) -> str:
    """What the command said."""
    variables = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    variables |= {"GSPO_HPC_TEST_GRADER_SECONDS": str(sweep.grader_seconds)}
    own = (f"run.dir={sweep.run_dir}", f"slurm.environment={json.dumps(variables)}")
    own += ("slurm.exclusive=true",)  # the nodes of a run are its own: who takes them meets no other
    values = ("--array", f"run.max_steps={','.join(map(str, steps))}", "--at-most", "2")
    done = sweep.command("submit", str(sweep.config), *own, *harness.OVERRIDES, *more, *values)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def restarts(run: SlurmRun) -> int:
    job = commands.job(run.job_id)
    assert job is not None
    return job.restarts


@pytest.mark.timeout(1200)
def test_one_task_is_preempted_another_requeued_a_third_left_alone(
    cluster: Cluster, sweep: SlurmRun, undisturbed: SlurmRun
) -> None:
    told = submit(sweep, STEPS)
    found = re.search(r"job array (\d+) submitted: 3 runs; sweep directory", told)
    assert found is not None, told
    array = found.group(1)
    runs = [
        SlurmRun(sweep.config, sweep.run_dir / f"max_steps-{steps}", job_id=f"{array}_{number}")
        for number, steps in enumerate(STEPS)
    ]
    first, short, last = runs
    assert "3 runs of 3 are running or waiting already" in submit(sweep, STEPS), "there are no second jobs"

    first.wait_for("rollout 0", in_rollout(first, 0))
    job = commands.job(first.job_id)
    assert job is not None
    take = ["sbatch", "--partition=high", f"--nodelist={job.nodes}", "--exclusive", "--output=/dev/null"]
    commands.run([*take, "--wrap=sleep 1"])
    first.wait_for("the preemption", lambda: first.attempts()[0]["ended"] is not None)
    reached = first.last_step()
    # In any order: the first run goes on in the rhythm of Slurm's queue, the last begins when the short one is done.
    killed = signalled = False
    deadline = time.monotonic() + 240.0
    while not (killed and signalled):
        assert time.monotonic() < deadline, f"{killed=} {signalled=}\n{first.log()}\n{last.log()}"
        if not killed and len(first.attempts()) == 2 and first.last_step() > reached:
            os.kill(first.supervisor(), signal.SIGKILL)
            killed = True
        if not signalled and last.last_step() >= 0 and 1 in last.workers():
            # It has the number of the array itself: a requeue of that number would mean all tasks.
            assert commands.parse_pairs(commands.run(["scontrol", "show", "job", "-o", last.job_id]))["JobId"] == array
            last.kill(1, signal.SIGUSR2)
            signalled = True
        time.sleep(0.05)
    table = sweep.command("status", str(sweep.run_dir)).stdout
    assert table.startswith(f"{sweep.run_dir}: 3 runs, "), table
    assert all(re.search(rf"^max_steps-{steps} .* of {steps} ", table, re.MULTILINE) for steps in STEPS), table
    for run in runs:
        run.wait_until_ended()

    ends = [[record["reason"] for record in run.attempts()] for run in runs]
    assert ends == [["preempted", "failed", "done"], ["done"], ["stopped", "done"]], ends
    assert [restarts(run) for run in runs] == [1, 0, 1]
    assert [{record["slurm_job_id"] for record in run.attempts()} for run in runs] == [{run.job_id} for run in runs]
    assert [run.last_step() for run in runs] == list(STEPS)
    first.job_id = ""
    assert_equal(first, undisturbed)

    assert "3 runs of 3 are done" in (again := submit(sweep, STEPS)) and "nothing to submit" in again, again
    page = sweep.command("report", str(sweep.run_dir))
    assert page.returncode == 0 and page.stdout.strip() == str(sweep.run_dir / "compare.html"), page.stderr
    text = (sweep.run_dir / "compare.html").read_text()
    assert all(f"max_steps-{steps}" in text for steps in STEPS)

    told = submit(sweep, (*STEPS, 500), "slurm.sbatch={begin: now+1hour}")
    assert re.search(r"job array \d+ submitted: 1 run;", told), told
    ended = sweep.command("cancel", str(sweep.run_dir))
    assert ended.returncode == 0 and "_3 is cancelled; it had not started" in ended.stdout, ended.stdout + ended.stderr
    assert "none of its runs is running" in sweep.command("cancel", str(sweep.run_dir)).stderr
    assert len(list(sweep.run_dir.glob("jobs/*/code.zip"))) == 2, "one archive for each submission, none for each run"
