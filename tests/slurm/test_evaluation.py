"""An evaluation as a job that runs out of time and goes back into the queue (three minutes, most of them Slurm's).

It would catch a job that begins anew after its requeue, one that Slurm ends at its time limit, a priority that is that
of every job, graders that are not those of the submission, and a `status` that does not know of the job, or of one that
has ended.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from gspo_hpc.launch.slurm import commands
from tests.slurm.harness import SlurmRun

GRADER = """
import time

def graded(completion, *, prompt, fields):
    time.sleep({seconds})
    return float(str(fields["answer"]) in completion)
"""


@pytest.mark.timeout(600)
def test_an_evaluation_goes_back_into_the_queue_until_it_is_done(undisturbed: SlurmRun) -> None:
    run = SlurmRun(undisturbed.config, undisturbed.run_dir)
    grader, out = undisturbed.run_dir.parent / "slow_grader.py", undisturbed.run_dir.parent / "evaluated.jsonl"
    grader.write_text(GRADER.format(seconds=5.0))
    reward = f"reward.functions=[{{function: '{grader}:graded'}}]"
    words = (str(run.run_dir), reward, "reward.workers=1", "--out")
    limits = ("slurm.partition=low", "slurm.time_minutes=2", "slurm.signal_seconds=60")
    done = run.command("eval", *words, str(out), "--slurm", *limits)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    run.job_id = done.stdout.split()[1]
    try:
        grader.write_text("what the job has is a copy")
        asked = subprocess.run(["scontrol", "show", "job", run.job_id], capture_output=True, text=True, check=True)
        assert "Nice=1000 " in asked.stdout and "Requeue=1 " in asked.stdout, asked.stdout
        told = run.command("status", str(run.run_dir)).stdout
        assert f"is evaluated by job {run.job_id} (" in told, told
        run.wait_until_ended("COMPLETED", timeout=400)
    finally:
        subprocess.run(["scancel", run.job_id], check=True)
    assert "is evaluated by" not in run.command("status", str(run.run_dir)).stdout
    job = commands.job(run.job_id)
    assert job is not None and job.restarts >= 1
    (log,) = (run.run_dir / "evaluations" / "jobs").glob(f"*/{run.job_id}_0_log.out")
    text = log.read_text()
    assert "the time is nearly up" in text and "going on: " in text and "accuracy" in text, text
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    grader.write_text(GRADER.format(seconds=0.0))
    alone = out.with_name("alone.jsonl")
    assert run.command("eval", *words, str(alone)).returncode == 0
    assert [json.loads(line) for line in alone.read_text().splitlines()] == rows
    assert not out.with_name("evaluated.jsonl.unfinished").exists()
