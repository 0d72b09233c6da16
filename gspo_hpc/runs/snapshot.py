"""Copy this package and the reward functions' files to the job folder, so that the submitted code is what runs.

Other files that a reward function imports are not copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gspo_hpc.config import paths
from gspo_hpc.config.schema import Reward
from gspo_hpc.system.environment import GRADERS
from gspo_hpc.system.files import make_private_dir, write_json


def grader_file(function: str) -> Path | None:
    """Return the file of path/to/file.py:function; None for a registered name."""
    path, colon, _ = function.rpartition(":")
    return Path(path).expanduser() if colon and path.endswith(".py") else None


def source(path: Path) -> Path:
    """Return the file to read for a grader's file: its copy, if this process belongs to a submitted job."""
    folder = os.environ.get(GRADERS)
    copy = Path(folder) / _name(path) if folder else path
    return copy if copy.exists() else path


def fingerprints(reward: Reward) -> dict[str, str]:
    """Return the SHA-256 of every grader's file that exists, by its path in the configuration."""
    files = {str(path): source(path) for term in reward.functions if (path := grader_file(term.function)) is not None}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}


def take(folder: Path, reward: Reward) -> None:
    """Copy package and graders into `folder`, for processes that have its :func:`environment`."""
    package = paths.PACKAGE
    make_private_dir(folder)
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    make_private_dir(folder / "graders")
    for path in _unique(grader_file(term.function) for term in reward.functions):
        shutil.copy(path, folder / "graders" / _name(path))
    described = subprocess.run(
        ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    write_json(folder / "origin.json", {"path": str(package), "commit": described.stdout.strip() or None})


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make a process use the copy in `folder`, whatever its current directory holds.

    The user's own PYTHONPATH comes after it.
    """
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(folder))]
    path = os.pathsep.join([str(folder), *theirs])
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", GRADERS: str(folder / "graders")}


def _unique(paths: Iterable[Path | None]) -> list[Path]:
    return sorted({path for path in paths if path is not None})


def _name(path: Path) -> str:
    return f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}-{path.name}"
