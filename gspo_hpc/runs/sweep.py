"""The directory of a sweep: runs that were submitted together, each in a folder of its own, and what they differ in."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.runs.lock import Lock
from gspo_hpc.system.files import read_json, write_json

_RECORD = "sweep.json"
_TASKS = "tasks.json"  # in the folder of a submission: the folder of each task's own submission, by the task's number


class SweepDir:
    """A folder with ``sweep.json``; the runs lie directly in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._record = self.path / _RECORD

    @property
    def exists(self) -> bool:
        """True if a sweep was begun here."""
        return self._record.exists()

    def lock(self) -> Lock:
        """Take the lock that a submission holds, or raise ValueError that says who has it."""
        return Lock(self.path / "lock")

    def open(self, points: Mapping[str, Sequence[str]]) -> str:
        """Add points, given as name -> settings, to those that are there; return the sweep's id. Call it locked."""
        new: dict[str, Any] = {"sweep_id": secrets.token_hex(8), "points": {}}
        record = self._read() if self.exists else new
        record["points"] |= {name: list(settings) for name, settings in points.items()}
        write_json(self._record, record)
        return str(record["sweep_id"])

    def refuse_other_content(self) -> None:
        """Raise ValueError if the folder belongs to something else."""
        if not self.exists and self.path.exists():
            there = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else ["run.json"]
            if others := [name for name in there if name != "lock"]:
                what = "is a run" if "run.json" in others else f"is not empty, and is no sweep (it has {others[0]})"
                raise ValueError(f"{self.path} {what}; give another run.name or run.dir")

    def points(self) -> dict[str, tuple[str, ...]]:
        """Return the settings of each point by its name, in their order. Raises ValueError where there is no sweep."""
        return {name: tuple(settings) for name, settings in self._read()["points"].items()}

    def runs(self) -> list[Path]:
        """Return the run directories of the points that have one."""
        return [path for name in self.points() if (path := self.path / name).joinpath("run.json").exists()]

    def write_tasks(self, folder: Path, tasks: Mapping[int, Path]) -> None:
        """Write down which run's submission each task of an array is, before the array is handed in."""
        write_json(folder / _TASKS, {str(task): str(one.relative_to(self.path)) for task, one in tasks.items()})

    def read_tasks(self, number: str) -> dict[str, Path]:
        """Return what :meth:`write_tasks` wrote for a submission, by the tasks' numbers; else nothing."""
        path = self.path / "jobs" / number / _TASKS
        found: dict[str, str] = read_json(path) if path.exists() else {}
        return {task: self.path / one for task, one in found.items()}

    def discard(self) -> None:
        """Remove the record of a sweep that was not submitted, and the folder if it is empty. Call it locked."""
        self._record.unlink(missing_ok=True)
        (self.path / "lock").unlink(missing_ok=True)
        for path in (self.path / "jobs", self.path):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _read(self) -> dict[str, Any]:
        if not self.exists:
            raise ValueError(f"{self.path}: not a sweep (it has no {_RECORD})")
        record = read_json(self._record)
        points = record.get("points") if isinstance(record, dict) else None
        if not isinstance(points, dict) or not isinstance(record.get("sweep_id"), str):
            raise ValueError(f"{self._record}: not the record of a sweep: it has no points or no sweep_id")
        return record


def expand(paths: Iterable[Path]) -> list[Path]:
    """Return run directories, with the runs of a sweep in place of its folder."""
    return [run for path in paths for run in (SweepDir(path).runs() if SweepDir(path).exists else [path])]
