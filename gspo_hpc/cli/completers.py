"""Completions that the Tab key offers: commands, options, presets, settings with their values, runs.

The shell asks the program itself (argcomplete), so that a new preset, run or setting is offered as soon as it is there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from gspo_hpc.cli.parser import COMMANDS, parsers
from gspo_hpc.config.paths import Part

Offers = dict[str, str]  # what may stand there, and what it means
_YAML = ("yaml", "yml")
# Settings that are paths.
_FILES = ("run.dir", "model.path", "data.train", "data.eval", "slurm.profile", "slurm.python")


def answer() -> None:
    """Write what may stand at the cursor to the shell that asks, and end the process."""
    asked = os.environ.get("COMP_LINE", "").split()
    top, commands = parsers([name for name in asked if name in COMMANDS])
    for parser in commands.values():
        for action in parser._actions:
            _attach(action)
    argcomplete.autocomplete(top)


def _attach(action: argparse.Action) -> None:
    """Tell argcomplete what an argument may be, by the name that its help has for it."""
    kind = action.metavar
    found: object = None
    if action.dest in ("overrides", "array"):
        found = overrides
    elif kind == "KEY":
        found = keys
    elif kind == "CONFIG":
        found = configs
    elif kind == "RUN":
        found = runs
    elif kind == "RUN|FILE":
        found = stored
    elif kind in ("CONFIG|RUN|MODEL_FOLDER", "RUN|MODEL_FOLDER"):
        found = targets
    elif kind == "DIR":
        found = DirectoriesCompleter()
    if found is not None:
        action.completer = found  # type: ignore[attr-defined]


def configs(prefix: str, **_: object) -> Offers:
    """Offer the presets, and config files here."""
    from gspo_hpc.config import paths

    found = dict.fromkeys(FilesCompleter(_YAML)(prefix), "")
    for folder in (paths.PRESETS, Path("configs")):
        found |= {file.stem: _about(file) for file in paths.files(folder, ".yaml", ".yml")}
    return found


def runs(prefix: str, **_: object) -> Offers:
    """Offer the runs in runs/ and in the folder that is typed, and the folders on the way to others."""
    from gspo_hpc.launch.status import runs_below

    folders = (Path("runs"), Path(prefix.rpartition("/")[0]))
    below = {str(path): "run" for folder in folders for path in runs_below(folder)}
    others = [path for path in DirectoriesCompleter()(prefix) if path.rstrip("/") not in below]
    return dict.fromkeys(others, "") | below


def targets(prefix: str, **_: object) -> Offers:
    """Offer what can be evaluated."""
    return configs(prefix) | runs(prefix)


def stored(prefix: str, **_: object) -> Offers:
    """Offer runs, and files with the completions of an evaluation."""
    return dict.fromkeys(FilesCompleter(("jsonl",))(prefix), "") | runs(prefix)


def keys(prefix: str, **_: object) -> Offers:
    """Offer the names of settings."""
    from gspo_hpc.config.reference.settings import settings

    return {key: one.meaning for key, one in settings().items()}


def overrides(prefix: str, **_: object) -> Offers:
    """Offer settings as far as `=`; behind it their values: all where there are few, else the default, or files."""
    from gspo_hpc.config import paths
    from gspo_hpc.config.reference.settings import settings

    key, equals, value = prefix.partition("=")
    if not equals:
        return {f"{name}=": one.meaning for name, one in settings().items()}
    if (one := settings().get(key)) is None:
        return {}
    values = {text: "default" if text == one.default else "" for text in (*one.choices, one.default)}
    if key == "slurm.profile":
        values |= {file.stem: _about(file) for file in paths.files(paths.PROFILES, ".yaml", ".yml")}
    if key in _FILES:
        values |= dict.fromkeys(FilesCompleter()(value), "")
    return {f"{key}={text}": about for text, about in values.items()}


def _about(file: Part) -> str:
    """Return the first comment of a YAML file."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
