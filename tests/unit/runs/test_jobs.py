"""Slurm jobs of a run, read from its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_folder, job_ids, job_logs


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with two jobs, and a submission that was killed before it knew its job."""
    for number, job_id in ((1, "9"), (2, "10"), (3, None)):
        folder = tmp_path / "run" / "jobs" / f"{number:04d}"
        folder.mkdir(parents=True)
        if job_id is not None:
            (folder / "job.json").write_text(json.dumps({"job_id": job_id}))
            (folder / f"{job_id}_0_log.out").write_text("")
    return RunDir(tmp_path / "run")


def test_jobs_are_in_the_order_of_their_submission(run: RunDir) -> None:
    assert job_ids(run) == ["9", "10"]
    assert [path.name for path in job_logs(run)] == ["9_0_log.out", "10_0_log.out"]
    assert [path.name for path in job_logs(run, "10")] == ["10_0_log.out"]
    assert job_logs(run, "0") == []


def test_the_folder_of_a_job(run: RunDir) -> None:
    assert job_folder(run, "10").name == "0002"
    with pytest.raises(ValueError, match="job 11 was not submitted from this run directory"):
        job_folder(run, "11")


def test_a_run_without_jobs(tmp_path: Path) -> None:
    assert job_ids(RunDir(tmp_path)) == [] and job_logs(RunDir(tmp_path)) == []
