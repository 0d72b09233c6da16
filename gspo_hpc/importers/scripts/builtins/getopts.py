"""Evaluate getopts, by which a shell script reads its options one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.scope import Unknown, is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader


def getopts(reader: Reader, words: Sequence[str], line: int) -> bool | None:
    """Read the next option as bash does; return whether there is one, None if it is not known."""
    scope = reader.scope
    if len(words) < 2:
        return False
    letters, name, *given = words
    index = scope.get("OPTIND")
    arguments = given or list(scope.arguments)
    if not arguments:
        scope.miss("@")
    known = isinstance(index, str) and index.isdecimal() and index != "0" and not is_unset(letters)
    at = int(index) if known and isinstance(index, str) else 0
    if not at or at <= len(arguments) and is_unset(arguments[at - 1]):
        why = Unknown(f"is read by getopts in line {line} from arguments that are not known")
        for key in (name, "OPTARG", "OPTIND"):
            scope.set(key, why)
        return None
    place = reader.option[1] if reader.option[0] == at else 0  # in a word of several letters, -abc
    word = arguments[at - 1] if at <= len(arguments) else ""
    if not place and (word in ("", "-", "--") or not word.startswith("-")):
        scope.values.pop("OPTARG", None)
        scope.set(name, "?")
        scope.set("OPTIND", str(at + (word == "--")))
        return False
    place = place or 1
    letter, rest = word[place], word[place + 1 :]
    found = letters.find(letter) if letter != ":" else -1
    value: str | None = None
    after = at if rest else at + 1
    if found < 0:
        value, letter = (letter if letters.startswith(":") else None), "?"
    elif letters[found + 1 : found + 2] == ":":
        value, after = rest, at + 1
        if not rest and at < len(arguments):
            value, after = arguments[at], at + 2
        elif not rest:
            value, letter = (letter, ":") if letters.startswith(":") else (None, "?")
    reader.option = (at, place + 1) if after == at else (0, 0)
    scope.set(name, letter)
    scope.set("OPTIND", str(after))
    if value is None:
        scope.values.pop("OPTARG", None)
    else:
        scope.set("OPTARG", value)
    return True
