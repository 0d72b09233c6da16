"""Follow read, mapfile and printf -v, which set variables that they name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.builtins.prefixes import not_yet
from gspo_hpc.importers.scripts.expansion import outputs
from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.parse import nodes
from gspo_hpc.importers.scripts.scope import Unknown, is_unset
from gspo_hpc.importers.scripts.words import text_of, text_with_values

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader


def named_later(command: str, line: int) -> str:
    """Return why variables are not known after a command that names them when the script runs."""
    return f"may be set by {command} in line {line}, where the variable's name is known only when the script runs"


def read(reader: Reader, name: str, rest: list[str], line: int) -> None:
    """Take what read and mapfile set to be unknown."""
    if name == "read" and (_read_whole(reader, rest) or _read_line(reader, rest)):
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


def _read_line(reader: Reader, rest: list[str]) -> bool:
    """Follow ``read -r A B <<< "x y"`` and ``read -ra A <<< "x y"``, of a text that is known."""
    options = "".join(word[1:] for word in rest if word.startswith("-"))
    names = [word for word in rest if not word.startswith("-")]
    given = [] if reader.statement is None else [n for n in nodes(reader.statement) if n.type == "herestring_redirect"]
    between = reader.scope.separators
    plain = names and all(name.isidentifier() for name in names) and sorted(options) in ([], ["r"], ["a"], ["a", "r"])
    if not plain or len(given) != 1 or not given[0].named_children or between is None:
        return False
    with not_yet(reader):
        text = text_of(given[0].named_children[-1], reader.scope)
    signs, blanks = between.strip(" \t\n"), "".join(sign for sign in between if sign in " \t\n")
    if is_unset(text) or "\n" in text or "\\" in text or (signs and blanks) or text[-1:] in (*signs,):
        return False
    text = text.strip(blanks) if blanks else text
    count = 0 if "a" in options else len(names) - 1
    if not between or (len(names) == 1 and "a" not in options):
        fields = [text]
    else:
        fields = re.split(f"[{re.escape(between)}]{'+' * (not signs)}", text, maxsplit=count) if text else []
    if "a" in options:
        if len(names) > 1:
            return False
        reader.scope.values.pop(names[0], None)
        reader.scope.set(names[0], tuple(fields))
    else:
        for name, value in itertools.zip_longest(names, fields[: len(names)], fillvalue=""):
            reader.scope.set(name, value)
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
    known = key == name and not any(isinstance(word, Open) or is_unset(word) for word in (form, *given))
    text = outputs.output_of(["printf", "--", form, *given], reader.scope, evaluate) if known else None
    reader.scope.set(key, Unknown(f"is written by printf in line {line}") if text is None else text)
