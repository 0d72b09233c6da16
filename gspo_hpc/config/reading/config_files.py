"""The file that a config's name means: a path, or a preset of this folder, of configs/ or of the package."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.config import paths
from gspo_hpc.config.paths import Part
from gspo_hpc.system.text import near_miss


def find_config(given: str) -> str:
    """Return the file of a config, given its path or the name of a preset, in configs/ here or in the package."""
    path = Path(given)
    if path.exists():
        return given
    if "=" in given:
        raise ValueError(f"{given} is a setting; the config file comes first: gspo-hpc COMMAND CONFIG key=value")
    folders: tuple[Part, ...] = (path.parent, Path("configs"), paths.PRESETS)
    there = {file.stem: file for folder in reversed(folders) for file in paths.files(folder, ".yaml", ".yml")}
    stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if path.name == given and stem in there:
        return str(there[stem])

    def shown(name: str) -> object:
        return name if str(there[name].parent) == str(paths.PRESETS) else there[name]  # a preset's name is enough

    raise ValueError(f"{given}: no such config file{near_miss(stem, there, shown=shown)}")
