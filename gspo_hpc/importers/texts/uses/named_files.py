"""Read the files that a command of TRL names: its own YAML, and that of accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts import documents
from gspo_hpc.importers.texts.sources import ACCELERATE

# Options of launchers -> what of accelerate's they decide.
_DECIDE = {"num_processes": "num_processes", "nproc_per_node": "num_processes", "num_gpus": "num_processes",
           "num_machines": "num_machines", "nnodes": "num_machines", "num_nodes": "num_machines",
           "distributed_type": "distributed_type", "mixed_precision": "mixed_precision"}  # fmt: skip


def of_trl(
    command: Command,
    place: Path,
    values: dict[str, Any],
    variables: dict[str, str],
    launcher: dict[str, Any],
    notes: list[str],
    left: dict[str, str],
    places: dict[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of a run with those of its YAML, and the variables with what accelerate's YAML says.

    `launcher`, `notes`, `left` and `places` are changed by what is read.
    """
    if given := values.pop("config", None):
        if isinstance(given, list):
            raise ValueError(f"--config {' '.join(map(str, given))}: TRL reads one file, and no words after it")
        theirs = documents.named(place, str(given), command.files)
        variables = variables | documents.environment(theirs, "env")
        places |= dict.fromkeys(theirs.keys() - values, str(given))
        values = {name: theirs[name] for name in theirs if name not in values} | values
        left[f"--config {given}"] = "it is read, and its arguments are taken as part of the command"
    told = {_DECIDE[name]: f"--{name} {launcher[name]}" for name in launcher if name in _DECIDE}
    for name in ("config_file", "accelerate_config"):
        file = variables.pop(name, "") or str(values.pop(name, ""))
        if file.endswith((".yaml", ".yml")):
            launch = _accelerate(place, f"--{name} {file}", command, variables, notes, left)
            if f"--{name} {file}" in left:
                launcher.pop(name, None)
            found = {key: str(launch[key]) for key in ACCELERATE if key in launch}
            variables = found | variables
            told = {key: f"{key} {found[key]} of {file}" for key in found} | told
    for name in [name for name in ACCELERATE if name in values]:
        if name not in told:
            variables[name] = str(values[name])
        elif str(values[name]) != variables.get(name):  # no argument of TRL, whose parser throws it away
            where = f"{places[name]}: " if name in places else ""
            left[f"{where}{name}={values.pop(name)}"] = f"the launcher decides, by {told[name]}"
    return values, variables


def _accelerate(
    place: Path, given: str, command: Command, variables: Mapping[str, str], notes: list[str], left: dict[str, str]
) -> dict[str, Any]:
    """Return accelerate's YAML, which an option names; where it is not at hand, `left` says so."""
    file = given.partition(" ")[2]
    try:
        return documents.named(place, file, command.files)
    except ValueError as error:
        told = "num_processes" in variables
        left[given] = "it is not at hand" if told else str(error)
        if not told:
            notes.append(f"{file} is not at hand, and may say how many processes there are: give --gpus N")
        return {}
