"""Submit a sweep: all of its runs as one array of Slurm jobs, each with a supervisor, a lock and a requeue of its own.

The folder of the sweep, which is the config's run directory, holds a folder for each run, and for each submission
jobs/NNNN with the code, the batch script and the logs. A task of the array is a job like that of a single run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace, run_name
from gspo_hpc.config.sweep import Point
from gspo_hpc.launch import preflight
from gspo_hpc.launch.checks import rehearse
from gspo_hpc.launch.slurm import commands, srun
from gspo_hpc.launch.slurm.compat import Executor
from gspo_hpc.launch.slurm.submit import (
    PATIENCE,
    Supervisor,
    checked,
    comment_of,
    hand_in,
    make_executor,
    require_safe,
    start_of_attempts,
    undone,
)
from gspo_hpc.runs import reader, snapshot
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.runs.jobs import discard, job_ids, new_job_folder, record_job
from gspo_hpc.runs.same_run import changes, made_progress
from gspo_hpc.runs.sweep import SweepDir
from gspo_hpc.system.files import make_private_dir, remove_tree, write_atomically

_RUN, _JOB = '"${job%/jobs/*}"', '"$job"'  # words of the batch script, for each task's own run and submission


@dataclass(frozen=True)
class Submitted:
    """The points of a sweep, by their names and by what became of them."""

    job_id: str | None  # None if there was nothing to submit
    submitted: tuple[str, ...]
    done: tuple[str, ...]
    active: tuple[str, ...]  # running or waiting already


def dry_run(points: Mapping[Point, Config], limit: int | None) -> str:
    """Return the batch script of a sweep, and how a task starts attempts. Writes nothing and asks Slurm nothing."""
    own = _each(points, _safe)
    runs = {point: _of_point(point, config) for point, config in own.items()}
    tried: set[str] = set()
    _each(runs, lambda config: rehearse(config, here=False, tried=tried))
    sweep = _sweep(points)
    jobs = {number: sweep.path / point.name / "jobs" / "NNNN" for number, point in enumerate(own)}
    folder = sweep.path / "jobs" / "NNNN"
    first, config = next(iter(own.items()))
    text = _script(own, sweep, folder, jobs, limit, None)
    told = start_of_attempts(_of_point(first, config), sweep.path / first.name, folder)
    return f"{text.rstrip()}\n\n# Of the first task:\n{told}"


def submit(
    points: Mapping[Point, Config],
    limit: int | None,
    told: Callable[[], None] | None = None,
    checks: Sequence[preflight.Check] = (),
) -> Submitted:
    """Submit those runs of a sweep that are neither done nor active, new or to be resumed.

    `points`: each with the config that its settings make; its run directory is that of the sweep. `limit`: how many may
    run at a time. Raises ValueError, which names the points, before anything is written, and SlurmError if
    Slurm does not take the array; then nothing of it is left. `told` is called once if Slurm does not answer at once.
    `checks`: more checks of each config.
    """
    tried: set[str] = set()
    own = _each(points, lambda config: checked(config, tried, checks))
    sweep = _sweep(points)
    _script(own, sweep, sweep.path, {}, limit, None)  # which must be one for all
    known = commands.own_jobs(PATIENCE, told)  # before anything is written: Slurm must answer
    begun = sweep.exists
    sweep.refuse_other_content()
    make_private_dir(sweep.path)
    with sweep.lock(), undone(lambda: None if begun else sweep.discard()):
        mark = f"gspo_hpc:{sweep.open({point.name: point.settings for point in points})}:"
        _record_found(sweep, mark, known)
        runs = {point: _of_point(point, config) for point, config in own.items()}
        states = {point: _state(config, {job_id for job_id, _ in known}) for point, config in runs.items()}
        todo = {point: config for point, config in runs.items() if states[point] == "todo"}
        job_id = _hand_in(todo, sweep, mark, limit) if todo else None
    named = {
        state: tuple(point.name for point in own if states[point] == state) for state in ("todo", "done", "active")
    }
    return Submitted(job_id, named["todo"], named["done"], named["active"])


def _hand_in(todo: Mapping[Point, Config], sweep: SweepDir, mark: str, limit: int | None) -> str:
    numbers = {name: number for number, name in enumerate(sweep.points())}
    with contextlib.ExitStack() as made:
        folder = new_job_folder(sweep.path)
        made.enter_context(undone(lambda: remove_tree(folder)))
        jobs: dict[int, Path] = {}
        for point, config in todo.items():
            run, resumed = open_run(config)
            if not resumed:
                made.enter_context(undone(lambda run=run: discard(run)))  # type: ignore[misc]
            job_dir = jobs[numbers[point.name]] = new_job_folder(run.path)
            made.enter_context(undone(lambda job_dir=job_dir: remove_tree(job_dir)))  # type: ignore[misc]
            write_atomically(job_dir / "config.yaml", loader.dump(config))
        first = next(iter(todo.values()))
        snapshot.take(folder / srun.CODE, *todo.values())
        sweep.write_tasks(folder, jobs)
        comment = comment_of(first, f"{mark}{folder.name}")
        executor = _executor(sweep, first, folder, jobs, limit, comment)
        command = _supervisor(first).command
        job_id = hand_in(lambda: executor.hand_in_script(command), folder, comment)
    for number, job_dir in jobs.items():
        record_job(job_dir, f"{job_id}_{number}", comment, logs=folder)
    return job_id


def _script(
    own: Mapping[Point, Config],
    sweep: SweepDir,
    folder: Path,
    jobs: Mapping[int, Path],
    limit: int | None,
    comment: str | None,
) -> str:
    """Return the batch script. Raises ValueError if points differ in what an array can have only once."""
    texts: dict[str, Point] = {}
    for point, config in own.items():
        executor = _executor(sweep, config, folder, jobs, limit, comment)
        texts.setdefault(executor.script(_supervisor(config).command), point)
    (text, first), *others = texts.items()
    if others:
        other, point = others[0]
        differs = set(other.splitlines()) ^ set(text.splitlines())
        shown = "; ".join(sorted(line.strip().removeprefix("#SBATCH ") for line in differs)[:2])
        raise ValueError(
            f"points {first.name} and {point.name} need different jobs ({shown}), but an array has one batch script: "
            "submit them as two sweeps"
        )
    return text


def _executor(
    sweep: SweepDir, config: Config, folder: Path, jobs: Mapping[int, Path], limit: int | None, comment: str | None
) -> Executor:
    pairs = " ".join(f"[{number}]={shlex.quote(str(job.relative_to(sweep.path)))}" for number, job in jobs.items())
    lines = [f"jobs=({pairs})", f'job={shlex.quote(str(sweep.path))}/"${{jobs[$SLURM_ARRAY_TASK_ID]}}"']
    array = _ranges(jobs) + (f"%{limit}" if limit else "")
    return make_executor(config, folder, comment, supervisor=_supervisor(config), array=array, setup=lines)


def _supervisor(config: Config) -> Supervisor:
    return Supervisor.in_shell(config, _RUN, _JOB)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as --array takes them, such as 0-2,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def _sweep(points: Mapping[Point, Config]) -> SweepDir:
    return SweepDir(Path(os.path.abspath(next(iter(points.values())).run_dir)))


def _of_point(point: Point, config: Config) -> Config:
    """Return the config of one run: below the sweep's folder, and with a name of its own."""
    name = run_name(f"{config.run.name}_{point.name}")
    return replace(config, run=replace(config.run, name=name, dir=str(Path(config.run_dir) / point.name)))


def _safe(config: Config) -> Config:
    require_safe(config)
    return config


def _each(points: Mapping[Point, Config], check: Callable[[Config], Config]) -> dict[Point, Config]:
    """Return what `check` makes of each config. Raises ValueError that says which points it refuses, and why."""
    found: dict[Point, Config] = {}
    refused: dict[str, list[str]] = {}
    for point, config in points.items():
        try:
            found[point] = check(config)
        except ValueError as error:
            refused.setdefault(str(error), []).append(point.name)
    if refused:
        raise ValueError("\n".join(f"{_named(names)}: {text}" for text, names in refused.items()))
    return found


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"point{'s' if len(names) > 1 else ''} {shown}"


def _record_found(sweep: SweepDir, mark: str, known: Iterable[tuple[str, str]]) -> None:
    """Write down the jobs of a submission that was killed after sbatch, before it could do so."""
    for job_id, comment in known:
        if mark in comment:
            number = comment.rpartition(":")[2]
            folder = sweep.read_tasks(number).get(job_id.rpartition("_")[2])
            if folder is not None and folder.is_dir() and not (folder / "job.json").exists():
                record_job(folder, job_id, comment, logs=sweep.path / "jobs" / number)


def _state(config: Config, active: set[str]) -> str:
    """Return "active", "done" or "todo" for a run. Raises ValueError if it has begun, or waits, with another config."""
    run = RunDir(config.run_dir)
    if not run.info.exists():
        return "todo"
    is_active = run.holder() is not None or bool(active & set(job_ids(run)))
    if (changed := changes(run, config)) and (is_active or made_progress(run)):
        raise ValueError(changed)
    if is_active:
        return "active"
    records = reader.read_records(run)
    return "done" if records and records[-1]["step"] >= (config.run.max_steps or 0) else "todo"
