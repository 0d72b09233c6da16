"""Copy this package and a user's own files to the job folder, so that the submitted code is what runs.

Other files that these import are not copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from gspo_hpc.config import paths
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config
from gspo_hpc.system.environment import GRADERS
from gspo_hpc.system.files import make_private_dir, write_json


def files(config: Config) -> dict[str, str]:
    """Return the names of all code of a user's own in a config, path/to/file.py:NAME, with what it is for."""
    named = dict.fromkeys((term.function for term in config.reward.functions), "reward function")
    named |= {config.algorithm.name: "algorithm"} | dict.fromkeys(config.tracking.observers, "observer")
    return {name: what for name, what in named.items() if own_code.file_of(name) is not None}


def fingerprints(config: Config) -> dict[str, str]:
    """Return the SHA-256 of every file of a user that decides what a run learns, by its path in the config.

    Files that do not exist are left out, and so are observers, which may change within a run.
    """
    found = {}
    for name, what in files(config).items():
        path = own_code.file_of(name)
        if path is not None and what != "observer" and own_code.source(path).is_file():
            found[str(path)] = hashlib.sha256(own_code.source(path).read_bytes()).hexdigest()
    return found


def take(folder: Path, config: Config) -> None:
    """Copy the package and a user's own files into `folder`, for processes that have its :func:`environment`."""
    package = paths.PACKAGE
    make_private_dir(folder)
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    make_private_dir(folder / "graders")
    for path in sorted({path for name in files(config) if (path := own_code.file_of(name)) is not None}):
        shutil.copy(path, folder / "graders" / own_code.copy_name(path))
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
