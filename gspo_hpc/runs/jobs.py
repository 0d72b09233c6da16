"""Slurm jobs of a run, as its directory records them: a folder RUN/jobs/NNNN for each submission."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import read_json


def job_ids(run: RunDir) -> list[str]:
    """Return Slurm's ids of the jobs of a run, oldest first."""
    return [_job_id(path) for path in _records(run)]


def job_folder(run: RunDir, job_id: str) -> Path:
    """Return the folder of the submission that made a job. Raises ValueError if no submission of this run did."""
    for path in _records(run):
        if _job_id(path) == job_id:
            return path.parent
    raise ValueError(f"{run.path}: job {job_id} was not submitted from this run directory")


def job_logs(run: RunDir, job_id: str | None = None) -> list[Path]:
    """Return the logs of the jobs of a run, or of one of them, oldest first. submitit names them."""
    return sorted(run.path.glob(f"jobs/*/{'*' if job_id is None else f'{job_id}_0'}_log.out"))


def _job_id(path: Path) -> str:
    """Return the id in a job.json. Raises ValueError where it has none."""
    record = read_json(path)
    found = record.get("job_id") if isinstance(record, dict) else None
    if not isinstance(found, str | int):
        raise ValueError(f"{path}: not the record of a job: it has no job_id")
    return str(found)


def _records(run: RunDir) -> list[Path]:
    return sorted((run.path / "jobs").glob("[0-9]*/job.json"))
