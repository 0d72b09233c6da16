"""Follow read, mapfile and printf -v, which set variables that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.scope import Unknown, is_unset
from gspo_hpc.importers.scripts.words import text_with_values

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader


def named_later(command: str, line: int) -> str:
    """Return why variables are not known after a command that names them when the script runs."""
    return f"may be set by {command} in line {line}, where the variable's name is known only when the script runs"


def read(reader: Reader, name: str, rest: list[str], line: int) -> None:
    """Take what read and mapfile set to be unknown."""
    if name == "read" and _read_whole(reader, rest):
        return
    why = Unknown(f"is read from the input by {name}")
    arrays = name != "read" or any(re.fullmatch(r"-\w*a", word) for word in rest)
    default = "REPLY" if name == "read" else "MAPFILE"
    for key in [*rest, default]:
        array = key.partition("[")[0]
        if array.isidentifier() and not is_unset(key):
            reader.scope.set(array, why)
            reader.scope.listed |= {array} if arrays or array != key else set()
        elif (is_unset(key) or isinstance(key, Open)) and _names(key, rest):
            reader.scope.lose_all(named_later(name, line))


def _read_whole(reader: Reader, rest: list[str]) -> bool:
    """Follow ``read -r -d '' NAME <<END``, which sets one variable to a whole here-document."""
    options = [word for word in rest if word.startswith("-")]
    names = [word for word in rest if word and not word.startswith("-")]
    given, between = reader.document, reader.scope.separators
    if given is None or between is None or len(names) != 1 or not names[0].isidentifier():
        return False
    letters = "".join(options).replace("-", "")
    ends = next((at for at, word in enumerate(rest[:-1]) if word.startswith("-") and word.endswith("d")), None)
    if sorted(letters) not in (["d", "r"], ["d"]) or ends is None or rest[ends + 1] != "":
        return False
    text = text_with_values(given, reader.scope)
    if text is None or ("\\" in text and "r" not in letters):
        return False
    reader.scope.set(names[0], text.strip("".join(sign for sign in between if sign in " \t\n")))
    return True


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
        reader.scope.lose_all(named_later("printf", line))
        return
    plain = len(given) == 1 and not isinstance(given[0], Open) and not is_unset(given[0]) and key == name
    plain = plain and (form == "%s" or (form == "%d" and re.fullmatch(r"0|-?[1-9]\d{0,17}", given[0]) is not None))
    reader.scope.set(key, given[0] if plain else Unknown(f"is written by printf in line {line}"))
