"""Find the files and folders that a command was given, or name the nearest ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gspo_hpc.config import loader, paths
from gspo_hpc.config.paths import Part
from gspo_hpc.config.schema import Config
from gspo_hpc.system.terminal import paint
from gspo_hpc.system.text import near_miss


def load_config(args: argparse.Namespace) -> Config:
    """Return the config that a command was given.

    From here on `args.config` is the path of its file, and `args.places` says where settings stand.
    """
    args.config = config_path(args.config)
    config, args.places = loader.load_with_places(args.config, args.overrides)
    if not any("." in key for key in args.places):
        sections = "sections such as run, model, data and reward"
        raise ValueError(
            f"{args.config}: the config is empty; write {sections}, or start from a preset, such as tiny_cpu"
        )
    return config


@contextmanager
def places_told(args: argparse.Namespace) -> Iterator[None]:
    """Add to a refusal of the plan where the settings stand that it speaks of."""
    from gspo_hpc.planning.plan import PlanError

    try:
        yield
    except PlanError as error:
        raise PlanError(error.broken, error.hint, args.places) from None


def config_path(given: str) -> str:
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


RUN_DIRECTORY = "run directory"  # what :func:`require_path` is asked for; only folders are offered in its place


def require_path(path: Path, what: str) -> None:
    """Raise ValueError, with the nearest path beside it, if a path does not exist."""
    if not path.exists():
        there = path.parent.iterdir() if path.parent.is_dir() else ()
        beside = [item.name for item in there if item.is_dir() or what != RUN_DIRECTORY]
        hint = near_miss(path.name, beside, shown=lambda name: path.parent / name)  # paths are alike for their folder
        raise ValueError(f"{path}: no such {what}{hint}")


def print_warnings(config: Config) -> None:
    """Print to standard error what is legal in a config and still hardly meant.

    Settings that contradict each other are left to the plan, which names them among all broken rules.
    """
    from gspo_hpc.algorithms import objective

    found: list[str] = []
    with suppress(ValueError):
        found = objective.warnings(config)
    for text in found:
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
