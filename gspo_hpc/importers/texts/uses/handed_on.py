"""Read the variables that a launcher sets, or takes away, for the program behind it: ``srun env NPROC_PER_NODE=2 ...``.

What stands before a command as a whole is followed by scripts/builtins/prefixes.py; here a launcher stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gspo_hpc.importers.scripts.script import Command

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"-e|-x|--env|--setenv|-E|--unset|-u")  # of docker, mpirun, systemd-run and env, with a value
_ATTACHED = re.compile(r"(--env|--setenv|--export|--unset|-e|-u)=?(.+)", re.DOTALL)
_ASSIGNING = ("env", "sudo")  # take assignments as words of their own


def followed(command: Command, launched: int) -> Command:
    """Return the command with the variables that the program sees; its first `launched` words are the launcher's."""
    words = command.words[:launched]
    if not words:
        return command
    given, gone = _read(words)
    if not given and not gone:
        return command
    variables = {name: value for name, value in command.variables.items() if name not in gone} | given
    unknown = {name: why for name, why in command.unknown.items() if name not in given and name not in gone}
    return replace(command, variables=variables, unknown=unknown, exported=(command.exported - gone) | given.keys())


def _read(words: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    given, gone = dict[str, str](), set[str]()
    program = ""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        before = words[at - 1] if at else ""
        if name in _ASSIGNING or (program == "" and at == 0):
            program = name
        elif match := _ASSIGNMENT.fullmatch(word):
            if program in _ASSIGNING or _OPTION.fullmatch(before):
                given[match[1]] = match[2]
        elif program == "env" and before in ("-u", "--unset") and word.isidentifier():
            gone.add(word)
        elif match := _ATTACHED.fullmatch(word):
            option, value = match[1], match[2]
            if option == "--export":
                given |= {found[1]: found[2] for part in value.split(",") if (found := _ASSIGNMENT.fullmatch(part))}
            elif option in ("--unset", "-u"):
                gone |= {value} if program == "env" and value.isidentifier() else set()
            elif found := _ASSIGNMENT.fullmatch(value):
                given[found[1]] = found[2]
    return given, gone - given.keys()
