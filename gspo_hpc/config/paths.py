"""Paths of the files that this package reads at run time, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]  # the folder gspo_hpc itself
ALGORITHMS = PACKAGE / "algorithms"  # a plug-in folder: each algorithm that a config may name is one file
IMPORT_ROOT = PACKAGE.parent  # put it on sys.path, and gspo_hpc can be imported; in a checkout, the project's folder
PRESETS = PACKAGE / "config" / "presets"  # NAME.yaml; in a checkout, a link to configs/
PROFILES = PACKAGE / "config" / "slurm_profiles"  # NAME.yaml; in a checkout, a link to slurm/profiles/
