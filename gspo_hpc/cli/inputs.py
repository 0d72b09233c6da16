"""Find the files and folders that a command was given, or name the nearest ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.reading.config_files import find_config
from gspo_hpc.config.schema import Config
from gspo_hpc.system.terminal import paint, pasteable
from gspo_hpc.system.text import near_miss


def load_config(args: argparse.Namespace) -> Config:
    """Return the config that a command was given.

    From here on `args.config` is the path of its file, and `args.places` says where settings stand.
    """
    args.config = find_config(args.config)
    config, args.places = loader.load_with_places(args.config, args.overrides, run_code=True)
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


RUN_DIRECTORY = "run directory"  # what :func:`require_path` is asked for; only folders are offered in its place


def require_path(path: Path, what: str) -> None:
    """Raise ValueError, with the nearest path beside it, if a path does not exist."""
    if not path.exists():
        there = path.parent.iterdir() if path.parent.is_dir() else ()
        beside = [item.name for item in there if item.is_dir() or what != RUN_DIRECTORY]
        # Folders and endings are not compared: for these alone short names would be alike.
        stems = {_stem(name): name for name in sorted(beside, key=lambda name: name.endswith(path.suffix))}
        hint = near_miss(_stem(path.name), stems, shown=lambda stem: path.parent / stems[stem])
        raise ValueError(f"{path}: no such {what}{hint}")


def require_new_file(path: Path | None) -> None:
    """Raise ValueError if a file cannot be written because it is there, or its folder is not. None is no file."""
    if path is None:
        return
    if path.exists():
        raise ValueError(f"--out {path}: exists; give another file")
    require_path(path.parent, "folder")


def _stem(name: str) -> str:
    """Return a name without the ending that says what kind of file it is; the size in Qwen2.5-7B is none."""
    stem, _, ending = name.rpartition(".")
    return stem if stem and ending.isalpha() else name


def find_target(path: Path, *, configs: bool = True) -> Path:
    """Return the directory of a run or the folder of a model that a command samples from; with `configs`, or a config.

    A config may be the name of a preset. Raises ValueError for everything else.
    """
    if configs and not path.exists():
        with suppress(ValueError):
            path = Path(find_config(str(path)))
    require_path(path, "config, run directory or model folder" if configs else "run directory or model folder")
    named = configs and not path.is_dir()
    if not named and not any((path / name).exists() for name in ("run.json", "config.json")):
        raise ValueError(
            f"{path}: neither a run directory (it has no run.json) nor the folder of a model (no config.json)"
        )
    return path


def print_warnings(config: Config) -> None:
    """Print to standard error what is legal in a config and still hardly meant.

    Settings that contradict each other are left to the plan, which names them among all broken rules.
    """
    from gspo_hpc.algorithms import objective

    found: list[str] = []
    with suppress(ValueError):
        found = objective.warnings(config)
    for text in found:
        warn(text)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"{paint('warning:', '33', sys.stderr)} {pasteable(text)}", file=sys.stderr)
