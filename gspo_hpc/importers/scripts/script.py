"""Hold what is known of a shell script: the commands that it runs, and what was noted on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspo_hpc.importers.scripts.places import Files


@dataclass(frozen=True)
class Command:
    """One command of a script: its words, and the variables that are set where it stands."""

    words: tuple[str, ...]
    variables: Mapping[str, str]  # an unknown value is the variable's own name, $NAME
    unknown: Mapping[str, str] = field(default_factory=dict)  # variable (*: any other) -> why it is not known
    might: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # variable -> words that it may hold
    files: Files = field(default_factory=Files)  # that the script has written
    exported: frozenset[str] = frozenset()  # variables that the command sees in its environment
    possible: bool = False  # it runs only if a condition holds that is not known
    folder: str = ""  # in which it runs, relative to that in which the script was started; "" if it is not known


@dataclass(frozen=True)
class Script:
    """The commands of a script."""

    commands: list[Command]  # those that run
    possible: list[Command]  # those that run only if a condition holds that is not known
    ended: str = ""  # the place of an exit that ends it before its last statement
    blanks: tuple[int, ...] = ()  # lines with a blank behind their last backslash, read as if it were not there
    read: tuple[str, ...] = ()  # files that it sources or starts, and that were read too
    required: tuple[str, ...] = ()  # sentences on variables without whose values it ends
    emptied: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # option -> variable that it is empty by, line
    missed: Mapping[str, str] = field(default_factory=dict)  # variable that it does not set (@: argument) -> place
    defaulted: tuple[str, ...] = ()  # variables of a batch system or a launcher for which it has a default
    not_read: tuple[str, ...] = ()  # sentences on scripts that it starts and that are not followed
    told: tuple[str, ...] = ()  # sentences on files that it sources or starts, which may be others where it runs
