"""Give a command the variables that a launcher sets, or takes away, for its program: ``srun env NPROC_PER_NODE=2 ...``.

What stands before a command as a whole is followed by scripts/builtins/prefixes.py; here a launcher stands before it.
"""

from __future__ import annotations

from dataclasses import replace

from gspo_hpc.importers.scripts.builtins.launchers import handed_on
from gspo_hpc.importers.scripts.script import Command

_OF_SIZES = ("NNODES", "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES")
_ASKED = {"swift": _OF_SIZES, "swift_hf": _OF_SIZES, "trl": _OF_SIZES[2:]}  # of a run whose GPUs these decide


def followed(command: Command, launched: int) -> Command:
    """Return the command with the variables that the program sees; its first `launched` words are the launcher's."""
    words = command.words[:launched]
    if not words:
        return command
    given, gone = handed_on(words)
    if not given and not gone:
        return command
    variables = {name: value for name, value in command.variables.items() if name not in gone} | given
    unknown = {name: why for name, why in command.unknown.items() if name not in given and name not in gone}
    return replace(command, variables=variables, unknown=unknown, exported=(command.exported - gone) | given.keys())


def environment(command: Command, source: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the variables of a command, why some are perhaps not exported, and what is to be told.

    Of those that programs read, only what is exported counts, as ``$NAME`` where that is not known.
    """
    perhaps = {name: why for name in command.variables if (why := command.unknown.get(f"export {name}"))}
    read = {name for name in command.variables if name in _OF_SIZES or name.startswith("WANDB_")}
    hidden = read - command.exported - perhaps.keys()
    variables = {name: value for name, value in command.variables.items() if name not in hidden}
    variables |= {name: f"${name}" for name in read & perhaps.keys() - command.exported}
    told = "is set, but not exported, so that the run does not get it: write export in front of it, or give --gpus N"
    lost = [name for name in _ASKED.get(source, ()) if name in hidden]
    return variables, perhaps, [f"{name}={command.variables[name]} {told}" for name in lost]
