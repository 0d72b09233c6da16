"""Give a command the variables that a launcher sets, or takes away, for its program: ``srun env NPROC_PER_NODE=2 ...``.

What stands before a command as a whole is followed by scripts/builtins/prefixes.py; here a launcher stands before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gspo_hpc.importers.scripts.builtins.launchers import handed_on
from gspo_hpc.importers.scripts.script import Command

_OF_SIZES = ("NNODES", "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES")
# Launchers that hand on what they are told to alone: those that start a program elsewhere, and in a container.
_APART = frozenset("docker podman nerdctl kubectl oc ssh".split())
_CONTAINERS = ("apptainer", "singularity")
_CLEANING = ("-e", "--cleanenv", "-C", "--containall")  # of these
_PREFIXED = re.compile(r"(?:APPTAINER|SINGULARITY)ENV_(\w+)")
_PRESERVES = re.compile(r"-\w*E|--preserve-env")
_ASKED = {"swift": _OF_SIZES, "swift_hf": _OF_SIZES, "trl": _OF_SIZES[2:]}  # of a run whose GPUs these decide


def followed(command: Command, launched: int) -> Command:
    """Return the command with the variables that the program sees; its first `launched` words are the launcher's."""
    words = command.words[:launched]
    if not words:
        return command
    given, gone = handed_on(words)
    if any(os.path.basename(word) in _CONTAINERS for word in words):
        given = _of_container(command, given)
    kept, keeps_back = _named(words), _keeps_back(words)
    if not given and not gone and not keeps_back:
        return command
    variables = {name: value for name, value in command.variables.items() if name not in gone} | given
    unknown = {name: why for name, why in command.unknown.items() if name not in given and name not in gone}
    exported = (command.exported - gone) | given.keys()
    if keeps_back:
        lost = {name for name in exported if _is_read(name)} - given.keys() - kept
        unknown |= {f"export {name}": f"is perhaps not handed on by {keeps_back}" for name in lost}
        exported -= lost
    return replace(command, variables=variables, unknown=unknown, exported=exported)


def _is_read(name: str) -> bool:
    """Tell whether programs read a variable themselves."""
    return name in _OF_SIZES or name.startswith("WANDB_")


def _keeps_back(words: Sequence[str]) -> str:
    """Return the launcher, and its option, that hands on none but the variables that it is told to; "" if all do."""
    for at, word in enumerate(words):
        name, rest = os.path.basename(word), words[at + 1 :]
        if name in _APART or (name == "sudo" and not any(map(_PRESERVES.match, rest))):
            return name
        if name in _CONTAINERS and (option := next((one for one in rest if one in _CLEANING), "")):
            return f"{name} {option}"
        if name == "srun" and (option := next((one for one in rest if one.lower() == "--export=none"), "")):
            return f"{name} {option}"
    return ""


def _named(words: Sequence[str]) -> set[str]:
    """Return the variables that a launcher hands on as they are: docker run -e NAME."""
    pairs = zip(words, words[1:], strict=False)
    found = {after for word, after in pairs if word in ("-e", "--env") and after.isidentifier()}
    return found | {word.partition("=")[2] for word in words if re.fullmatch(r"--env=[A-Za-z_]\w*", word)}


def _of_container(command: Command, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that apptainer sets: several behind one --env, and those named APPTAINERENV_NAME."""
    found = dict[str, str]()
    for name, value in given.items():
        first, *others = re.split(r",(?=[A-Za-z_]\w*=)", value)
        found |= {name: first} | dict(other.split("=", 1) for other in others)
    for name, value in command.variables.items():
        if name in command.exported and (match := _PREFIXED.fullmatch(name)) and match[1] not in found:
            found[match[1]] = value
    return found


def environment(command: Command, source: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the variables of a command, why some are perhaps not exported, and what is to be told.

    Of those that programs read, only what is exported counts, as ``$NAME`` where that is not known.
    """
    perhaps = {name: why for name in command.variables if (why := command.unknown.get(f"export {name}"))}
    read = {name for name in command.variables if _is_read(name)}
    hidden = read - command.exported - perhaps.keys()
    variables = {name: value for name, value in command.variables.items() if name not in hidden}
    variables |= {name: f"${name}" for name in read & perhaps.keys() - command.exported}
    told = "is set, but not exported, so that the run does not get it: write export in front of it, or give --gpus N"
    lost = [name for name in _ASKED.get(source, ()) if name in hidden]
    return variables, perhaps, [f"{name}={command.variables[name]} {told}" for name in lost]
