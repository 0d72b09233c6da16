"""Keep this package and a user's own files in one archive of the job folder: what was submitted is what runs.

Python imports the package from the archive as it is, so a run has one file of code, however many nodes read it, and
nothing is unpacked that would have to be removed. Other files that a user's file imports are not kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

from gspo_hpc.config import paths
from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config
from gspo_hpc.system.environment import CODE, import_root
from gspo_hpc.system.files import write_atomically

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file knows: archives of the same code are equal


def files(config: Config) -> dict[str, str]:
    """Return the names of all code of a user's own in a config, path/to/file.py:NAME, with what it is for."""
    named = dict.fromkeys((term.function for term in config.reward.functions), "reward function")
    named |= {config.algorithm.name: "algorithm"} | dict.fromkeys(config.tracking.observers, "observer")
    if config.environment.name is not None:
        named[config.environment.name] = "environment"
    named |= dict.fromkeys((tool.function for tool in config.environment.tools), "tool")
    return {name: what for name, what in named.items() if own_code.file_of(name) is not None}


def fingerprints(config: Config) -> dict[str, str]:
    """Return the SHA-256 of every file of a user that decides what a run learns, by its path in the config.

    Files that do not exist are left out, and so are observers, which may change within a run. Of a reward model's
    folder it is that of its small files, and of the names and sizes of its weights.
    """
    found = {}
    for name, what in files(config).items():
        path = own_code.file_of(name)
        if path is not None and what != "observer" and own_code.source(path).is_file():
            found[str(path)] = hashlib.sha256(own_code.source(path).read_bytes()).hexdigest()
    for model in config.reward.models:
        if os.path.isdir(model.path):
            found[model.path] = _of_model(Path(model.path))
    return found


def _of_model(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode("utf-8", "surrogateescape"))
        if file.suffix in (".json", ".jinja", ".txt") and size <= WHOLE_FILE_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def take(archive: Path, *configs: Config) -> None:
    """Write the package and a user's own files into `archive`, for processes that have its :func:`environment`."""
    if import_root().is_file():  # a submitted job that submits: its user's files may be others
        with zipfile.ZipFile(import_root()) as own:
            content = {name: own.read(name) for name in own.namelist() if name.startswith(f"{paths.PACKAGE.name}/")}
    else:
        folder = import_root() / paths.PACKAGE.name
        content = {f"{folder.name}/{path.relative_to(folder)}": path.read_bytes() for path in _files(folder)}
    named = (own_code.file_of(name) for config in configs for name in files(config))
    for path in sorted({path for path in named if path is not None}):
        content[own_code.copy_name(path)] = path.read_bytes()
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
        ["git", "-C", str(import_root()), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None
