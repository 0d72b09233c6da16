"""Keep this package and the reward functions' files in one archive of the job folder: what was submitted is what runs.

Python imports the package from the archive as it is, so a run has one file of code, however many nodes read it, and
nothing is unpacked that would have to be removed. Other files that a reward function imports are not kept.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from gspo_hpc.config import paths
from gspo_hpc.config.paths import Part
from gspo_hpc.config.schema import Reward
from gspo_hpc.system.environment import CODE
from gspo_hpc.system.files import write_atomically

_GRADERS = "graders"  # the folder of the reward functions' files
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file knows: archives of the same code are equal


def grader_file(function: str) -> Path | None:
    """Return the file of path/to/file.py:function; None for a registered name."""
    path, colon, _ = function.rpartition(":")
    return Path(path).expanduser() if colon and path.endswith(".py") else None


def source(path: Path) -> Part:
    """Return the file to read for a grader's file: its copy, if this process belongs to a submitted job."""
    archive = os.environ.get(CODE)
    if archive is None or not os.path.isfile(archive):
        return path
    copy = zipfile.Path(archive, f"{_GRADERS}/{_name(path)}")
    return copy if copy.exists() else path


def grader_spec(key: str, path: Path) -> ModuleSpec:
    """Return how to import a grader's file under the name `key`: its copy, as :func:`source` has it."""
    found = source(path)
    loader = None if isinstance(found, Path) else _Kept(found)
    spec = importlib.util.spec_from_file_location(key, str(found), loader=loader)
    assert spec is not None and spec.loader is not None
    return spec


class _Kept(importlib.abc.SourceLoader):
    """The loader of a file in an archive; tracebacks show its lines."""

    def __init__(self, path: zipfile.Path) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        """Return the path that tracebacks name."""
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the content of the file, the only one that this loader has."""
        if path != str(self._path):
            raise OSError(f"{path!r} is not kept")  # Python looks for bytecode beside it
        return self._path.read_bytes()


def fingerprints(reward: Reward) -> dict[str, str]:
    """Return the SHA-256 of every grader's file that exists, by its path in the configuration."""
    files = {str(path): source(path) for term in reward.functions if (path := grader_file(term.function)) is not None}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}


def take(archive: Path, *rewards: Reward) -> None:
    """Write package and the graders of `rewards` into `archive`, for processes that have its :func:`environment`."""
    if paths.IMPORT_ROOT.is_file():  # a submitted job that submits: its graders may be others
        with zipfile.ZipFile(paths.IMPORT_ROOT) as own:
            content = {name: own.read(name) for name in own.namelist() if name.startswith(f"{paths.PACKAGE.name}/")}
    else:
        folder = paths.IMPORT_ROOT / paths.PACKAGE.name
        content = {f"{folder.name}/{path.relative_to(folder)}": path.read_bytes() for path in _files(folder)}
    for grader in _unique(grader_file(term.function) for reward in rewards for term in reward.functions):
        content[f"{_GRADERS}/{_name(grader)}"] = grader.read_bytes()
    content["origin.json"] = json.dumps({"path": str(paths.PACKAGE), "commit": _commit()}).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, data in content.items():
            whole.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    write_atomically(archive, buffer.getvalue())


def environment(archive: Path) -> dict[str, str]:
    """Return the variables that make a process use the code in `archive`, whatever its current directory holds.

    The user's own PYTHONPATH comes after it.
    """
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(archive))]
    path = os.pathsep.join([str(archive), *theirs])
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", CODE: str(archive)}


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, through links, without compiled ones."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(parent, name) for name in sorted(names) if not name.endswith(".pyc"))


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    described = subprocess.run(
        ["git", "-C", str(paths.IMPORT_ROOT), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def _unique(paths: Iterable[Path | None]) -> list[Path]:
    return sorted({path for path in paths if path is not None})


def _name(path: Path) -> str:
    return f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}-{path.name}"
