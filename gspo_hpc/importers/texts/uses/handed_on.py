"""Give a command the variables that a launcher sets, or takes away, for its program: ``srun env NPROC_PER_NODE=2 ...``.

What stands before a command as a whole is followed by scripts/builtins/prefixes.py; here a launcher stands before it.
"""

from __future__ import annotations

from dataclasses import replace

from gspo_hpc.importers.scripts.builtins.launchers import handed_on
from gspo_hpc.importers.scripts.script import Command


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
