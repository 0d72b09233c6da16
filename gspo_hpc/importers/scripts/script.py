"""Hold what is known of a shell script: the commands that it runs, and what was noted on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NODES = re.compile(r"(?m)^#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)\s*(?:#.*)?$")
_GPUS = re.compile(r"(?m)^#SBATCH\s+--(?:gres[= ]gpu:(?:\w+:)?|gpus-per-node[= ](?:\w+:)?)(\d+)\s*(?:#.*)?$")
_EXPORT = re.compile(r"(?m)^#SBATCH\s+--export[= ](\S+)")


@dataclass(frozen=True)
class Command:
    """One command of a script: its words, and the variables that are set where it stands."""

    words: tuple[str, ...]
    variables: Mapping[str, str]  # an unknown value is the variable's own name, $NAME
    unknown: Mapping[str, str] = field(default_factory=dict)  # variable (*: any other) -> why it is not known
    might: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # variable -> words that it may hold
    files: Mapping[str, str | None] = field(default_factory=dict)  # path -> text that the script has written, if known
    exported: frozenset[str] = frozenset()  # variables that the command sees in its environment
    possible: bool = False  # it runs only if a condition holds that is not known


@dataclass(frozen=True)
class Script:
    """The commands of a script."""

    commands: list[Command]  # those that run
    possible: list[Command]  # those that run only if a condition holds that is not known
    ended: int = 0  # the line of an exit that ends it before its last statement, 0 if there is none
    blanks: tuple[int, ...] = ()  # lines with a blank behind their last backslash, read as if it were not there
    read: tuple[str, ...] = ()  # files that it sources or starts, and that were read too
    required: tuple[str, ...] = ()  # sentences on variables without whose values it ends
    emptied: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # option -> variable that it is empty by, line
    missed: Mapping[str, str] = field(default_factory=dict)  # variable that it does not set (@: argument) -> place


def directives(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets by the lines #SBATCH of a script, if sbatch gets no other options."""
    found: dict[str, str] = {}
    if match := _NODES.search(text):
        found |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), match[1])
    if match := _GPUS.search(text):
        found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), match[1])
    return found | exports(text)


def exports(text: str) -> dict[str, str]:
    """Return the variables that lines ``#SBATCH --export=NAME=value,...`` of a script put into its environment."""
    found: dict[str, str] = {}
    for match in _EXPORT.finditer(text):
        pairs = (pair.partition("=") for pair in match[1].strip("\"'").split(","))
        found |= {name: value for name, sign, value in pairs if sign and name.isidentifier()}
    return found
