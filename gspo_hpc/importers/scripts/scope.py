"""The variables at one place of a shell script, and how two ways through the script are joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.importers.scripts.expansion.splitting import BLANKS, Open, is_open

if TYPE_CHECKING:
    from tree_sitter import Node

_REFERENCE = "may be set through another name of a variable (declare -n) that is not known"
_PRESUMED = "may be set by whoever starts the script"
REST = Open("${@}")  # as an argument: which ones stand here, and how many, is not known
SHIFTED = "is an argument, and how many of them are left (shift, set --) is not known before the script runs"
_LEFT = re.compile(r"\$(?:[A-Za-z_{(\[?$!@*#-]|\d)")
# Variables that a shell computes itself: what a script assigns to them is not what they have later.
COMPUTED = frozenset(
    "_ BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_LINENO BASH_REMATCH "
    "BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS "
    "HISTCMD LINENO PIPESTATUS PPID RANDOM SECONDS SHELLOPTS SRANDOM UID".split()
)
# Variables that a shell has in any case: where a script does not set them, they are set, to what is not known.
SURE = frozenset(
    "HOME USER LOGNAME HOSTNAME PWD OLDPWD UID EUID SHELL PATH PPID RANDOM SECONDS OSTYPE HOSTTYPE".split()
)
ALWAYS = (
    SURE
    | COMPUTED
    | frozenset(
        "BASH BASH_EXECUTION_STRING BASH_VERSION BASH_LOADABLES_PATH BASH_ENV BASH_COMPAT BASH_XTRACEFD COMP_KEY "
        "COMP_CWORD COMP_LINE COMP_POINT COMP_TYPE COMP_WORDS COMPREPLY COLUMNS LINES IFS MACHTYPE OPTERR PS4 "
        "READLINE_LINE READLINE_ARGUMENT READLINE_MARK READLINE_POINT SHLVL".split()
    )
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


class Outcome(NamedTuple):
    """State that one of several blocks leaves behind."""

    values: dict[str, Value]
    functions: dict[str, Node | None]
    arguments: tuple[str, ...]
    over: bool  # it has passed an exit that ends nothing
    number: int  # of the block


@dataclass
class Scope:
    """The variables at one place of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # $1, $2, ...: of a function; a script is read as if started without any
    script: str = ""  # $0, if it is known
    temporary: dict[int, int] = field(default_factory=dict)  # line -> names of files that mktemp has made there
    reset: bool = False  # set has replaced the arguments that the present file was sourced with
    here: str | None = None  # the file in which the present line stands, if it is another one; "" if it is not known
    homes: dict[str, str | None] = field(default_factory=dict)  # that of the line which defined a function
    batch: dict[str, str] = field(default_factory=dict)  # variables that Slurm sets: a file that is sourced does not
    sourced: str = ""  # why a variable that is not set here may still be set: a file is sourced
    empty: bool = False  # a variable that is not set counts as empty, as in conditions
    shadowed: set[str] = field(default_factory=set)  # names that the script has made functions of
    partly: dict[str, Unknown] = field(default_factory=dict)  # variable -> what may stand at its ${NAME} in a value
    mixed: str = ""  # why no variable has a value that is known: each $ may be the caller's
    trapped: dict[str, Unknown] = field(default_factory=dict)  # what handlers may set at any time (*: any variable)
    touched: set[str] = field(default_factory=set)  # variables that were set (*: perhaps any)
    given: set[str] = field(default_factory=set)  # variables that stand in front of the calls that are followed
    lasting: set[str] = field(default_factory=set)  # variables that a function sets beyond those in front of its call
    listed: set[str] = field(default_factory=set)  # variables that were arrays at some place
    bodies: list[Node] = field(default_factory=list)  # of all functions
    outputs: dict[str, str] = field(default_factory=dict)  # NAME() -> why what the function writes is not known
    ended: dict[str, str] = field(default_factory=dict)  # local variables of calls that are over -> why not known
    depth: int = 0  # functions around the present words whose output is followed
    followed: int = 0  # calls of functions whose output was followed
    emptied: dict[str, tuple[str, int]] = field(default_factory=dict)  # option -> variable that it is empty by, line
    line: int = 0  # of the present statement
    main: str = ""  # the script that is read, where $0 is that of another one which it starts
    defaulted: dict[str, None] = field(default_factory=dict)  # variables that a launcher may set, with a default here
    presumed: set[str] = field(default_factory=set)  # why values that whoever starts the script gives are not known
    missed: dict[str, str] = field(default_factory=dict)  # variable that is not set (@: argument) -> place of its use

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or of a positional parameter; None if it is not set, which is noted."""
        found = self.held(name)
        if found is None:
            self.miss(self.target(name) or name)
        return found

    def presume(self, names: Iterable[str]) -> None:
        """Take variables (@: the arguments) to be set to what is not known, as by whoever starts the script."""
        for name in names:
            if name == "@":
                self.arguments = (REST,)
                self.presumed.add(SHIFTED)
            else:
                self.values[name] = Unknown(why_not_set(name) if is_launched(name) else _PRESUMED)
                self.put_mark("export", name, True)
                self.presumed.add(_PRESUMED)

    def miss(self, name: str) -> None:
        """Note that the script counts on a variable, or on its arguments (@), which a run may have been given."""
        name = "@" if not name.isidentifier() else name
        if name not in ALWAYS and not is_launched(name):
            self.missed.setdefault(name, self.place)

    @property
    def place(self) -> str:
        """Return the line of the present statement, with its file if that is not the script which is read."""
        file = self.here or (self.script if self.script != self.main else "")
        of = f" of {file.rpartition('/')[2]}" if file else ""
        return f"line {self.line}{of}"

    def held(self, name: str) -> Value | None:
        """Return the value of a variable or of a positional parameter; None if it is not set."""
        if name.isdecimal():
            number = int(name[:9])
            if number == 0:
                return self.script or None
            if is_open(self.arguments[:number]):
                return Unknown(SHIFTED)
            return self.arguments[number - 1] if number <= len(self.arguments) else None
        if name == "BASH_SOURCE" and name not in self.values:
            return (self.script if self.here is None else self.here) or None
        if isinstance(self.values.get(name), Reference):
            target = self.target(name)
            return self.held(target) if target else Unknown(_REFERENCE)
        held = self.values.get(name)
        if self.mixed and not (held is None and name in self.batch):  # which is the caller's value, too
            return Unknown(self.mixed)
        if name in self.batch and (held is None or (isinstance(held, Unknown) and held.why == self.sourced)):
            return self.batch[name]
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
        held = self.values.get(name)
        if isinstance(value, tuple | dict):
            self.listed.add(name)
        if isinstance(value, str) and isinstance(held, Unknown) and name in self.listed:
            value = Unknown("may be an array of which an element is changed")
        if isinstance(value, str) and isinstance(held, tuple | dict):  # element 0 of an array is meant
            changed = Unknown("is an array of which an element is changed")
            value = (value, *held[1:]) if isinstance(held, tuple) and not is_open(held[:1]) else changed
        if name in COMPUTED or self.mark("readonly", name) is not False:
            value = Unknown("is set by the shell" if name in COMPUTED else "may not be changed (readonly)")
        if self.mark("letters", name) is not False:
            value = value if isinstance(value, Unknown) else Unknown("is declared with letters that are changed")
        if not isinstance(value, tuple | dict) and (sets := self.mark("option", "allexport")) is not False:
            self.put_mark("export", name, True if sets else None)
        value = self.trapped.get(name) or self.trapped.get("*") or value
        if not isinstance(value, Unknown | Reference) and sum(map(len, value)) > _LONGEST:
            raise ValueError(f"the value of {name} has more than {_LONGEST} characters")
        self.values[name] = value

    # What is declared of a variable, and options of the shell, are kept as values whose names no variable can have, so
    # that they are joined, restored and lost together with the variables.

    def mark(self, kind: str, name: str) -> bool | None:
        """Tell whether a variable is declared so (export, readonly), or an option is set; None if it is not known."""
        held = self.values.get(f"{kind} {name}", "")
        return bool(held) if isinstance(held, str) else None

    def put_mark(self, kind: str, name: str, value: bool | None) -> None:
        """Declare a variable so, or set an option."""
        why = Unknown("depends on a condition that is not known before the script runs")
        self.values[f"{kind} {name}"] = why if value is None else "1" * value

    @property
    def exported(self) -> frozenset[str]:
        """Return the variables that commands see in their environment."""
        return frozenset(key[7:] for key in self.values if key.startswith("export ") and self.mark("export", key[7:]))

    @property
    def separators(self) -> str | None:
        """Return what separates words (IFS), None if it is not known."""
        held = self.values.get("IFS")
        if held is None:
            return BLANKS
        return held if isinstance(held, str) and not is_unset(held) else None

    def unset(self, name: str) -> None:
        """Take a variable away, through references to it."""
        if target := self.target(name):
            self.touched.add(target)
            if (kept := self.mark("readonly", target)) is False:
                for key in (target, f"export {target}", f"integer {target}", f"letters {target}"):
                    self.values.pop(key, None)
            elif kept is None:
                self.values[target] = Unknown("may not be changed (readonly)")
        else:
            self.lose_all(_REFERENCE)

    def lose_all(self, why: str, sets: bool = True) -> None:
        """Take every variable to be unknown; `sets`: also those that are not set, which may be set now."""
        self.sourced = why if sets else self.sourced
        self.touched.add("*")
        lost = [key for key, held in self.values.items() if key.isidentifier() and not isinstance(held, Reference)]
        lost += [key for key in self.values if key.startswith("function ")]
        self.values.update(dict.fromkeys(lost, Unknown(why)))

    # Functions whose output is followed are kept among the values in the same way, each as the number of its body.

    def define(self, name: str, body: Node | None) -> None:
        """Define a function."""
        self.shadowed.add(name)
        self.homes[name] = self.here
        if body is None or self.mark("readonly function", name) is not False:
            self.values[f"function {name}"] = Unknown("may not be changed (readonly)")
            return
        if body not in self.bodies:
            self.bodies.append(body)
        self.values[f"function {name}"] = str(self.bodies.index(body))

    def body(self, name: str) -> Node | None:
        """Return the body of a function, None where it is not known which one it has here, or whether it has one."""
        held = self.values.get(f"function {name}")
        as_written = self.mark("option", "expand_aliases") is False and self.mark("option", "handlers") is False
        return self.bodies[int(held)] if isinstance(held, str) and as_written else None

    def calls(self) -> dict[str, str]:
        """Return why the outputs of functions are not known, for each NAME() that the script has defined.

        Local variables of calls that are over are among the names: what was computed from them is still in use.
        """
        return self.ended | {f"{name}()": not_followed(name) for name in self.shadowed} | self.outputs

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
                kept = (*shortest, Open(f"${{{name}}}"))
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
        held = self.partly.get(name, unknown)  # of an earlier ${NAME} in the same value
        self.partly[name] = Unknown(why, tuple(dict.fromkeys((*held.might, *unknown.might))))
        return kept

    def growing(self, name: str, before: Value, after: Value, why: str) -> Value:
        """Return a list, or a text of words, that a loop may have made longer: what it began with, and ${NAME}."""
        return self._differing(name, (before, after), why)

    def goes_on(self, name: str, before: Value | None, after: Value | None) -> bool:
        """Tell whether a list or a text has only got further words at its end; notes them, if it had before."""
        if isinstance(before, tuple) and isinstance(after, tuple):
            grew, more = bool(before) and after[: len(before)] == before, after[len(before) :]
        elif isinstance(before, str) and isinstance(after, str):
            rest = after.removeprefix(before)
            grew, more = bool(before) and after.startswith(f"{before} "), tuple(rest.split())
        else:
            return False
        if grew and (unknown := self.partly.get(name)):
            self.partly[name] = Unknown(unknown.why, tuple(dict.fromkeys((*unknown.might, *more))))
        return grew


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


def demanded(line: int, values: Sequence[str] = ()) -> Unknown:
    """Return the value of a variable without which the script does not run: whoever starts it gives one.

    `values`: those that it may have, where the script says which.
    """
    what = " or ".join(values) or "it"
    return Unknown(f"has to be given to the script (line {line} demands {what}), and is not known before it runs")


def not_followed(name: str) -> str:
    """Return why it is not known what a function writes, as a clause that "it" stands before."""
    return f"calls the function {name}, whose output is not followed"


def why_left(value: str, variables: Mapping[str, str], unknown: Mapping[str, str]) -> str:
    """Return why a text of a script is not known in full, as a clause. `unknown`: as a command of the script has it."""
    found = re.findall(r"\$\{?[#!]?(\w+)", value)
    for name in found:
        if why := unknown.get(name) or unknown.get("*"):
            return f"${name} {why}"
    if unset := [name for name in found if variables.get(name) in (None, f"${name}", f"${{{name}}}")]:
        name = min(unset, key=ALWAYS.__contains__)  # rather one that the shell does not set itself
        return f"${name} {why_not_set(name)}"
    if later := next((name for name in found if is_unset(variables.get(name))), ""):
        return f"${later} has a value that is known only when the script runs"
    for name in re.findall(r"\$\(\s*([^\s()]+)", value.replace("...", " ")):
        if why := unknown.get(f"{name}()"):
            return f"it {why}"
    return "this form of expansion is not followed" if found else "its value is known only when the script runs"


def is_unset(value: Any) -> bool:
    """Tell whether a value still contains a shell variable, or a command that would have to be run."""
    return isinstance(value, str) and _LEFT.search(value) is not None


def may_be_empty(text: str) -> bool:
    """Tell whether a text has nothing but expansions whose values are not known."""
    return not re.sub(r"\$\w+|\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\$\{[^}]*\}|\$\(.*\)", "", text)
