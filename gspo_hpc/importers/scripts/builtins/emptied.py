"""Note the options whose whole value is a variable that a shell script leaves empty."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gspo_hpc.importers.scripts.parse import line_of, source_of
from gspo_hpc.importers.scripts.scope import Scope

if TYPE_CHECKING:
    from tree_sitter import Node

# An option, = or blanks, and a variable: as words of a command, elements of an array, or within a text.
_VALUE = re.compile(
    r"""(?:^|(?<=[\s"'(]))[-+~]*([A-Za-z][\w.+@/-]*)(?:=|(?:\s|\\\n)+)(["']?)\$(?:\{(\w+)(:?-)?\}|(\w+))\2(?=[\s"')]|$)"""
)


def note(scope: Scope, statement: Node | None) -> None:
    """Note the options in a statement whose values are empty as it is followed."""
    if statement is None:
        return
    source = source_of(statement)
    for match in _VALUE.finditer(source):
        name = match[3] or match[5]
        held = scope.get(name)
        if held == "" or (held is None and match[4]):
            line = line_of(statement) + source.count("\n", 0, match.start(1))
            scope.emptied[match[1].replace("-", "_")] = (name, line)


def told(emptied: Mapping[str, tuple[str, int]], values: Mapping[str, Any], flag: str) -> Iterator[str]:
    """Yield a sentence for each argument of a run that is empty by a variable. `flag`: before the name of an argument.

    A run may have been started with the variable set, and tests in the script may ask for that in any way.
    """
    for name, value in values.items():
        variable, line = emptied.get(name.replace("-", "_"), ("", 0))
        if variable and (value is None or value is True or not str(value).strip("[]'\" ,")):
            yield (
                f"{flag}{name} is empty, since ${variable} is (line {line}): if the original run was started with it, "
                f"write {variable}=VALUE in the first line of the script"
            )
