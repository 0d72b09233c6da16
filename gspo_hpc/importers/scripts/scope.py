"""The variables at one place of a shell script, and how two ways through the script are joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_REFERENCE = "may be set through another name of a variable (declare -n) that is not known"
REST = "${@}"  # as the last argument: which ones follow, and how many, is not known
SHIFTED = "is an argument, and how many of them are left (shift, set --) is not known before the script runs"
_LEFT = re.compile(r"\$(?:[A-Za-z_{(]|\d)")
# Variables that a shell has in any case: where a script does not set them, they are set, to what is not known.
ALWAYS = frozenset(
    "HOME USER LOGNAME HOSTNAME PWD OLDPWD UID EUID SHELL PATH PPID RANDOM SECONDS OSTYPE HOSTTYPE".split()
)
# Variables that a batch system or a launcher may set: where a script does not, it is not known whether they are set.
_LAUNCHED = re.compile(
    r"(?:SLURM|SLURMD|PBS|LSB|SGE|OMPI|PMI|PMIX)_\w+|(?:CUDA|NVIDIA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|"
    r"(?:LOCAL_|GROUP_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
)
_LONGEST = 1 << 16  # characters of a value; X=$X$X in a few lines makes it as long as one likes


@dataclass(frozen=True)
class Unknown:
    """The value of a variable that only running the script would tell."""

    why: str  # continues a sentence whose subject is the variable
    might: tuple[str, ...] = ()  # words that it may hold, where the script says which


@dataclass(frozen=True)
class Reference:
    """Another name of a variable, as ``declare -n`` makes it."""

    target: str  # "" where it is not known


Value = str | tuple[str, ...] | dict[str, str] | Unknown | Reference  # a text, an array, or an array with keys
_DEEPEST = 8  # references to references


@dataclass
class Scope:
    """The variables at one place of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # $1, $2, ...: of a function; a script is read as if started without any
    script: str = ""  # $0, if it is known
    sourced: str = ""  # why a variable that is not set here may still be set: a file is sourced
    empty: bool = False  # a variable that is not set counts as empty, as in conditions
    exported: set[str] = field(default_factory=set)
    integers: set[str] = field(default_factory=set)  # declared with -i: what is assigned to them is computed
    partly: dict[str, Unknown] = field(default_factory=dict)  # variable -> what may stand at its ${NAME} in a value
    trapped: dict[str, Unknown] = field(default_factory=dict)  # what handlers may set at any time (*: any variable)
    touched: set[str] = field(default_factory=set)  # variables that were set (*: perhaps any)

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or of a positional parameter; None if it is not set."""
        if name.isdigit():
            number = int(name[:9])
            if number == 0:
                return self.script or None
            if self.arguments[-1:] == (REST,) and number >= len(self.arguments):
                return Unknown(SHIFTED)
            return self.arguments[number - 1] if number <= len(self.arguments) else None
        if name == "BASH_SOURCE" and name not in self.values:
            return self.script or None
        if isinstance(self.values.get(name), Reference):
            target = self.target(name)
            return self.get(target) if target else Unknown(_REFERENCE)
        if name not in self.values and self.sourced:
            return Unknown(self.sourced)
        if name == "OPTIND":
            return self.values.get(name, "1")
        return self.values.get(name)

    def target(self, name: str) -> str:
        """Return the variable that a name stands for: its own, but for references; "" where that is not known."""
        for _ in range(_DEEPEST):
            held = self.values.get(name)
            if not isinstance(held, Reference):
                return name
            name = held.target
        return ""

    def set(self, name: str, value: Value) -> None:
        """Set a variable, through references to it. Raises ValueError for a value that is absurdly long."""
        if not isinstance(value, Reference):
            name = self.target(name)
        if not name:
            self.lose_all(_REFERENCE)
            return
        self.touched.add(name)
        value = self.trapped.get(name) or self.trapped.get("*") or value
        if not isinstance(value, Unknown | Reference) and sum(map(len, value)) > _LONGEST:
            raise ValueError(f"the value of {name} has more than {_LONGEST} characters")
        self.values[name] = value

    def unset(self, name: str) -> None:
        """Take a variable away, through references to it."""
        if target := self.target(name):
            self.touched.add(target)
            self.values.pop(target, None)
        else:
            self.lose_all(_REFERENCE)

    def lose_all(self, why: str) -> None:
        """Take every variable to be unknown, set or not."""
        self.sourced = why
        self.touched.add("*")
        self.values.update({key: Unknown(why) for key, held in self.values.items() if not isinstance(held, Reference)})

    def restore(self, before: dict[str, Value], names: Iterable[str]) -> None:
        """Give variables the values that they had before."""
        for name in names:
            if name in before:
                self.values[name] = before[name]
            else:
                self.values.pop(name, None)

    def join(self, outcomes: Sequence[dict[str, Value]], why: str) -> None:
        """Take the variables to be those of one of `outcomes`, not known which: those that differ become unknown.

        A list to which only some outcomes add something keeps what it has in all of them, and ${NAME} at its end.
        """
        names = dict.fromkeys(name for values in outcomes for name in values)
        joined: dict[str, Value] = {}
        for name in names:
            values = [values.get(name) for values in outcomes]
            first = values[0]
            if first is not None and all(value == first for value in values):
                joined[name] = first
            else:
                joined[name] = self._differing(name, values, why)
        self.values = joined

    def _differing(self, name: str, values: Sequence[Value | None], why: str) -> Value:
        if any(isinstance(value, Reference) for value in values):
            return Reference("")
        given = ["" if value is None else value for value in values]
        rests: list[tuple[str, ...]] = []
        kept: Value | None = None
        if arrays := [value for value in given if isinstance(value, tuple)]:
            shortest = min(arrays, key=len)
            if len(arrays) == len(given) and all(value[: len(shortest)] == shortest for value in arrays):
                rests = [value[len(shortest) :] for value in arrays]
                kept = (*shortest, f"${{{name}}}")
        elif texts := [value for value in given if isinstance(value, str)]:
            short = min(texts, key=len)
            ends = [value[len(short) :] for value in texts if value.startswith(short)]
            listed = all(not end or end[0].isspace() or not short for end in ends)
            if short and listed and len(ends) == len(given):
                rests = [tuple(end.split()) for end in ends]
                kept = f"{short} ${{{name}}}"
        may = rests or [_words(value) for value in given]
        unknown = Unknown(why, tuple(dict.fromkeys(word for words in may for word in words)))
        if kept is None:
            return unknown
        self.partly[name] = unknown
        return kept


def _words(value: Value) -> tuple[str, ...]:
    if isinstance(value, Unknown):
        return value.might
    return tuple(value.split()) if isinstance(value, str) else tuple(value) if isinstance(value, tuple) else ()


def is_launched(name: str) -> bool:
    """Tell whether a batch system or a launcher may set a variable."""
    return _LAUNCHED.fullmatch(name) is not None


def why_not_set(name: str) -> str:
    """Return why a variable has no value that is known, as a clause that its name stands before."""
    if name in ALWAYS:
        return "is set by the shell"
    more = ", and a batch system or a launcher may set it" if is_launched(name) else ""
    return f"is not set in the script{more}"


class Piece(NamedTuple):
    """A part of a word."""

    text: str
    splits: bool = False  # an expansion without quotes: the blanks in it separate words
    ends: bool = False  # a new word begins after this one, as between the elements of an array


def is_unset(value: Any) -> bool:
    """Tell whether a value still contains a shell variable, or a command that would have to be run."""
    return isinstance(value, str) and _LEFT.search(value) is not None
