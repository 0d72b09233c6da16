"""Run of another project before its arguments are converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers.scripts.script import Command

READ = "its Python file is read"  # among the variables of a run
# Arguments of its launcher that matter.
ACCELERATE = ("num_processes", "num_machines", "distributed_type", "mixed_precision")


class Found(NamedTuple):
    """A run of another project: its arguments, the variables around it, and all commands of the script."""

    source: str  # name of the table of its arguments
    values: dict[str, Any]
    variables: dict[str, str]
    commands: list[Command]
    notes: tuple[str, ...] = ()
    left: Mapping[str, str] = {}  # what was given and is no setting of the run, as it was given -> why
    unknown: Mapping[str, str] = {}  # shell variable (*: any other) -> why
    launcher: Mapping[str, Any] = {}  # options of the program that starts the ranks
    doubts: tuple[str, ...] = ()  # places of a Python file that may change any argument
    doubted: frozenset[str] = frozenset()  # arguments that they may change
    might: Mapping[str, tuple[str, ...]] = {}  # arguments that a condition adds -> the values that it may give them
    places: Mapping[str, str] = {}  # arguments that a file which the command names gives -> that file
    missed: Mapping[str, str] = {}  # variables that the script asks for and does not set (@: arguments) -> place
    defaulted: tuple[str, ...] = ()  # those of a batch system or a launcher for which the script has a default
    possible: tuple[Found, ...] = ()  # runs that start only if a condition holds that is not known


class SeveralRunsError(ValueError):
    """Several runs that one script starts."""

    def __init__(self, runs: Sequence[Found]) -> None:
        super().__init__(f"it starts {len(runs)} runs: leave one in the file")
        self.runs = tuple(runs)
