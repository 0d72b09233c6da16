"""Words of a command that are known only when the script runs, and may be any number of options."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.scope import may_be_empty

VARIABLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
UNSET = "not set in the script; what it adds is not known"
WRITTEN = "known only when the script runs; what it adds is not known"
_NAME = re.compile(r"\$\{?[#!]?(\w+)")
_ARGUMENTS = re.compile(r"\$\{?[@*]")
_COMMAND = re.compile(r"\$\(\s*([\w/-]+)")
# Commands that write one word, as people give them to an option without quotes.
_ONE_WORD = set(
    "arch basename bc date dirname expr git hostname id mktemp nproc nvidia-smi pwd python python3 readlink realpath "
    "seq tty uname uuidgen wc which whoami".split()
)


def may_be_options(word: str) -> bool:
    """Tell whether a word after the value of an option may be further options: one that is not known as a whole.

    Without quotes it may be any number of words. One in quotes is a value, but for a variable, as in ``"$EXTRA"``.
    """
    return VARIABLE.fullmatch(word) is not None or (isinstance(word, Open) and may_be_empty(word))


def why(word: str, unknown: Mapping[str, str], variables: Container[str]) -> str:
    """Return what is to be told of a word that may be any number of options.

    `unknown`: why variables have no value that is known. `variables`: those that are set.
    """
    name = match[1] if (match := VARIABLE.fullmatch(word) or _NAME.match(word)) else ""
    if "$(" in word:
        found = WRITTEN
    elif _ARGUMENTS.match(word):
        found = "arguments of the script or of a function, which are not known in full; what it adds is not known"
    elif VARIABLE.fullmatch(word) and name in unknown:
        found = f"${name} {unknown[name]}; what it adds is not known"
    elif name in unknown or name in variables:
        found = "this form of expansion is not followed; what it adds is not known"
    else:
        found = UNSET
    return found


def apart(
    values: dict[str, Any], left: dict[str, str], read: frozenset[str], might: Mapping[str, tuple[str, ...]]
) -> None:
    """Take words that may be options of their own out of the values of options; `left` gets them.

    `read`: options whose value is told where it is not known. `might`: words that the script's variables may hold.
    """
    for name, value in list(values.items()):
        words = value if isinstance(value, list) else [value]
        if lost := [word for word in words[1:] if may_be_options(word)]:
            left |= dict.fromkeys(lost, UNSET)
            kept = [word for word in words if word not in lost]
            values[name] = kept[0] if len(kept) == 1 else kept
        if isinstance(word := words[0], str) and may_be_options(word):
            match = VARIABLE.fullmatch(word)
            holds = might.get(match[1], ()) if match else ()
            if any(one.startswith("--") for one in holds):  # `--flag "${MORE[@]}"`: more options, or none
                left[word] = UNSET
                values[name] = True if holds[0].startswith("--") else word
            elif name not in read and _has_several(word):
                left[word] = UNSET


def _has_several(word: str) -> bool:
    """Tell whether an expansion that stands where a value may stand is as likely to be several words."""
    if command := _COMMAND.match(word):
        return command[1].rpartition("/")[2] not in _ONE_WORD
    return "[@]" in word
