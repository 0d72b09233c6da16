"""Slurm jobs of a run, as its directory records them: a folder RUN/jobs/NNNN for each submission."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import make_inner_dir, read_json, write_json

_RECORD = "job.json"


def new_job_folder(run: Path) -> Path:
    """Make the folder of the next submission of a run, or of a sweep, and return its path."""
    jobs = run / "jobs"
    make_inner_dir(jobs)
    number = max((int(path.name) for path in jobs.iterdir() if path.name.isdecimal()), default=0) + 1
    folder = jobs / f"{number:04d}"
    make_inner_dir(folder)
    return folder


def record_job(folder: Path, job_id: str, comment: str, logs: Path | None = None) -> None:
    """Write down Slurm's id of a submission's job. `logs`: the folder of the job's log, if it is not this one."""
    record = {"job_id": job_id, "comment": comment}
    if logs is not None:
        record["logs"] = os.path.relpath(logs, folder)
    write_json(folder / _RECORD, record)


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
    """Return the logs of the jobs of a run, or of one of them, oldest first. submitit names them.

    That of a task of a sweep is in the sweep's own folder.
    """
    found: list[Path] = []
    for folder in sorted((run.path / "jobs").glob("[0-9]*")):
        here = sorted(folder.glob(f"{'*' if job_id is None else f'{job_id}_0'}_log.out"))
        found += here or _logs_elsewhere(folder / _RECORD, job_id)
    return found


def discard(run: RunDir) -> None:
    """Remove a run that was made to be submitted, and that Slurm did not take. Call it locked."""
    for path in (run.info, run.config, run.path / "lock"):
        path.unlink(missing_ok=True)
    for path in (run.attempts, run.rollouts, run.checkpoints, run.path / "jobs", run.path):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def _logs_elsewhere(path: Path, job_id: str | None) -> list[Path]:
    try:
        record = _read(path)
    except (FileNotFoundError, ValueError):  # a submission that was not finished, or a damaged record
        return []
    own, logs = str(record["job_id"]), record.get("logs")
    if not isinstance(logs, str) or job_id not in (None, own):
        return []
    return sorted(Path(os.path.normpath(path.parent / logs)).glob(f"{own}_0_log.out"))


def _job_id(path: Path) -> str:
    """Return the id in a job.json. Raises ValueError where it has none."""
    return str(_read(path)["job_id"])


def _read(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("job_id"), str | int):
        raise ValueError(f"{path}: not the record of a job: it has no job_id")
    return record


def _records(run: RunDir) -> list[Path]:
    return sorted((run.path / "jobs").glob(f"[0-9]*/{_RECORD}"))
