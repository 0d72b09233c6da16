"""Paths of the files that this package reads at run time, wherever it is installed.

A submitted run imports the package from an archive (runs/snapshot.py). There they are paths in a zip file, which can be
read like others.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from gspo_hpc.system.environment import import_root

Part = Path | zipfile.Path  # a file or a folder of the package


def _package() -> Part:
    folder = import_root() / __name__.partition(".")[0]
    return zipfile.Path(folder.parent, f"{folder.name}/") if folder.parent.is_file() else folder


PACKAGE = _package()  # the folder gspo_hpc itself
ALGORITHMS = PACKAGE / "algorithms"  # a plug-in folder: each algorithm that a config may name is one file
PRESETS = PACKAGE / "config" / "presets"  # NAME.yaml; in a checkout, a link to configs/
PROFILES = PACKAGE / "config" / "slurm_profiles"  # NAME.yaml; in a checkout, a link to slurm/profiles/


def files(folder: Part, *suffixes: str) -> list[Part]:
    """Return the files of a folder that end so, by name; none if there is no such folder."""
    found: list[Part] = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((path for path in found if path.name.endswith(suffixes)), key=lambda path: path.name)
