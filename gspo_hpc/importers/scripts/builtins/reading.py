"""Follow read, mapfile and printf -v, which set variables that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.scope import Unknown, is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader


def named_later(command: str, line: int) -> str:
    """Return why variables are not known after a command that names them when the script runs."""
    return f"may be set by {command} in line {line}, where the variable's name is known only when the script runs"


def read(reader: Reader, name: str, rest: list[str], line: int) -> None:
    """Take what read and mapfile set to be unknown."""
    why = Unknown(f"is read from the input by {name}")
    arrays = name != "read" or any(re.fullmatch(r"-\w*a", word) for word in rest)
    default = "REPLY" if name == "read" else "MAPFILE"
    for key in [*rest, default]:
        array = key.partition("[")[0]
        if array.isidentifier() and not is_unset(key):
            reader.scope.set(array, why)
            reader.scope.listed |= {array} if arrays or array != key else set()
        elif (is_unset(key) or isinstance(key, Open)) and _names(key, rest):
            reader.lose_all(named_later(name, line))


def _names(word: str, words: Sequence[str]) -> bool:
    """Tell whether a word of read is a variable's name, and not the value of an option such as -p."""
    at = words.index(word)
    return not at or not re.fullmatch(r"-\w*[dinNptuCcOs]", words[at - 1])


def printf(reader: Reader, rest: list[str], line: int) -> None:
    """Follow ``printf -v NAME``."""
    if not rest or not rest[0].startswith("-v"):
        return
    words = rest[1:] if rest[0] == "-v" else [rest[0][2:], *rest[1:]]
    if len(words) < 2:
        return
    name, form, *given = words
    key = name.partition("[")[0]
    if is_unset(name) or any(isinstance(word, Open) for word in (name, form)):
        reader.lose_all(named_later("printf", line))
        return
    plain = len(given) == 1 and not isinstance(given[0], Open) and not is_unset(given[0]) and key == name
    plain = plain and (form == "%s" or (form == "%d" and re.fullmatch(r"0|-?[1-9]\d{0,17}", given[0]) is not None))
    reader.scope.set(key, given[0] if plain else Unknown(f"is written by printf in line {line}"))
