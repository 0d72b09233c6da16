"""Collect the settings that another project's run amounts to, and what becomes of each of its arguments.

A converter reads arguments by name, which checks them, and puts settings of ours. An argument is carried over if it
decides a key of ours; all others are reported with the reason, so that nothing of the original run is lost silently.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.importers import report, tables
from gspo_hpc.importers.inputs import NULLS, is_null, opposites, yaml_value
from gspo_hpc.importers.report import Argument
from gspo_hpc.importers.scripts.scope import ALWAYS, is_unset, why_left
from gspo_hpc.importers.tables import Table
from gspo_hpc.importers.typos import misspelt
from gspo_hpc.system.text import near_miss

_OFF: tuple[Any, ...] = (None, "false", "False", "null", "None", "none", "", "disabled")  # and False; not 0
_TRUE, _FALSE = ("true", "1", "yes", "y", "t"), ("false", "0", "no", "n", "f")
_CHOICE, _DEFAULT = 0.75, "its default is used instead"  # how alike a misspelt choice is; where one is not known


@dataclasses.dataclass(frozen=True)
class Source:
    """A project that runs are converted from."""

    project: str  # as people call it
    kind: str  # what is read: "command line" ...
    flag: str  # before the name of an argument where it is shown
    table: Table  # its arguments


class Draft:
    """Settings of ours with their comments, and what is to be said about the rest."""

    def __init__(
        self,
        source: Source,
        values: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        unknown: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.values, self.variables = source, dict(values), dict(variables or {})
        self.unknown = dict(unknown or {})  # shell variable (*: any other) -> why its value is not known
        self.settings: dict[str, tuple[Any, str]] = {}
        self.origins: dict[str, str] = {}  # our key -> the argument it came from
        self.differs: list[str] = []  # where the meaning of a size is another
        self.assumed: list[str] = []  # what was not given, and is needed
        self.problems: list[str] = []
        self.doubts: tuple[str, ...] = ()  # places of a Python file that may change the arguments `doubted`
        self.doubted: frozenset[str] = frozenset()
        self.might: Mapping[str, tuple[str, ...]] = {}  # arguments that a condition adds -> what it may give them
        self.places: Mapping[str, str] = {}  # arguments that a file beside the command gives -> that file
        self.around: list[str] = []  # of the script and its launcher: what only running the script would tell
        self._decided: dict[str, list[str]] = {}  # argument -> our keys that it decides
        self._left: dict[str, str] = {}  # argument -> why it is not carried over
        self.served: Mapping[str, Any] = {}  # arguments of the command that starts a generation server
        self._open, self._taken = set[str](), set[str]()  # known only when the script runs; read by a converter
        self._older: dict[str, str] = {}
        self.lost: dict[str, list[str]] = {}  # argument that is null, empty or not known -> our keys it would decide

    def rename(self) -> None:
        """Read arguments that had another name in earlier versions by their present one."""
        for older, name in self.source.table.renamed.items():
            if older in self.values and name not in self.values:
                self.values[name] = self.values.pop(older)
                self._older[name] = older
            elif older in self.values:
                self.drop(older, f"{self.source.flag}{name}, its present name, is given too")
        for off, value in opposites(self.values, self.source.table.known).items():
            if (on := off[3:]) in self.values:
                self.drop(off, f"of it and {self.label(on)} the later one counts")
            else:
                self._older[on], _ = off, self.values.pop(off)
            self.values[on] = value

    def copy(self) -> None:
        """Put the arguments whose value is the value of one key of ours, as the project's table lists them."""
        for name, (key, default) in self.source.table.copied.items():
            kind = tables.kind_of(key)
            value: Any
            if name in self.source.table.nulls and name in self.values and is_null(self.values[name]):
                self._decided.setdefault(name, []).append(key)
                self.put(key, self.source.table.nulls[name], comment=f"{name} is null")
                continue
            if default is None and not self.given(name):
                continue
            if kind is bool:
                value = self.switch(name, default)
            elif kind is int:
                value = self.whole(name, default, tables.least_of(key))
            elif kind is float:
                value = self.number(name, default)
            else:
                value = self.texts(name, known=True) if kind is list else self.text(name, default)
            if isinstance(value, str) and is_unset(value):
                self.keep(key, name, value)
            elif value is not None:
                self.put(key, value, name)

    # -- what is given

    def given(self, name: str) -> bool:
        """Tell whether the argument is given with a value that is known, and neither null nor an empty text."""
        return not is_unset(value := self.values.get(name)) and not is_null(value)

    def name(self, present: str) -> str:
        """Return the name by which an argument is given, which may be an earlier one."""
        return self._older.get(present, present)

    def sure(self, name: str, default: str, instead: str = _DEFAULT) -> str:
        """Return the text of an argument; `default` if it is not given, or not known, which is told with `instead`."""
        value = self.text(name) or default
        if is_unset(value):
            self._unset(name, value, instead)
            return default
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the text of an argument; a shell variable may still stand in it."""
        value = self._take(name)
        if value is None or isinstance(value, bool | list | Mapping):
            if value not in (None, True):
                self.wrong(name, "must be one text")
            return default
        return str(value) if str(value).strip() else default

    def texts(self, name: str, known: bool = False) -> list[str]:
        """Return the texts of an argument that takes several; with `known`, none unless all are known."""
        value = self._take(name)
        if isinstance(value, str) and value.startswith("["):  # a list as Hydra writes it
            inner = yaml_value(value)
            value = inner if isinstance(inner, list) else value
        items = [] if value is None or isinstance(value, bool | Mapping) else value
        found = [str(item) for item in (items if isinstance(items, list) else [items])]
        if known and is_unset(whole := " ".join(found)):
            self._unset(name, whole)
            found = []
        return found

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """Return a whole number; `default` if it is not given, null, or a variable whose value is not known."""
        value = self._number_text(name)
        if value is None:
            return default
        try:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            number = int(value) if isinstance(value, str) and value.lstrip("+-").isdecimal() else int(float(value))
        except (ValueError, TypeError, OverflowError):
            self.wrong(name, "must be a whole number")
            return default
        if number < least:
            self.wrong(name, f"must be {least} or more")
            return default
        return number

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float | None:
        """Return a number of at least `least`; `default` as for :meth:`whole`."""
        value = self._number_text(name)
        if value is None:
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            self.wrong(name, "must be a number")
            return default
        if number < least:
            self.wrong(name, f"must be {least:g} or more")
            return default
        return number

    def switch(self, name: str, default: bool = False) -> bool:
        """Return true or false; a bare name is true."""
        value = self._number_text(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        if str(value).lower() in (*_TRUE, *_FALSE):
            return str(value).lower() in _TRUE
        self.wrong(name, "must be true or false")
        return default

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Return one of a few names."""
        value = self.text(name, default) or default
        if is_unset(value):
            self._unset(name, value)
            return default
        if value not in allowed:
            self.wrong(name, f"must be one of {', '.join(allowed)}{near_miss(value, allowed, cutoff=_CHOICE)}")
            return default
        return value

    def skip(self, *patterns: str) -> None:
        """Mark arguments as read that nothing needs to be said about."""
        for name in self.values:
            if any(fnmatch(name, pattern) for pattern in patterns):
                self._taken.add(name)

    # -- what becomes of it

    def put(self, key: str, value: Any, name: str | None = None, comment: str = "", of: Sequence[str] = ()) -> None:
        """Set a key of ours.

        `name` is the argument that it came from. If that is not given, a comment says that the value is the other
        project's default, and the line is left out if our default is the same. `of`: further arguments that decide it.
        """
        for other in of:
            self.credit(key, other)
        if name is not None:
            self._taken.add(name)
            self.credit(key, name)
        if name is not None and not self.given(name):
            if value == tables.default_of(key) and not comment:
                return
            comment = f"default of {self.source.project}" + (f"; {comment}" if comment else "")
        self.settings[key] = (value, comment)
        if name is not None:
            self.origins[key] = name

    def credit(self, key: str, *names: str) -> None:
        """Note that arguments decide a key of ours, also where its value is our default."""
        for name in names:
            if self.given(name) and key not in self._decided.setdefault(name, []):
                self._decided[name].append(key)
            elif name in self.values and key not in self.lost.setdefault(name, []):
                self.lost[name].append(key)

    def keep(self, key: str, name: str, value: str, comment: str = "") -> None:
        """Set a key of ours to a text in which shell variables may still stand, as in a path."""
        unset = set(re.findall(r"\$\{?(\w+)\}?", value)) - ALWAYS  # their text in a path is what is meant
        if not is_unset(value):
            self.put(key, value, name, comment)
            return
        why = f"{self.why_unset(value)}; write it out"
        self.put(key, value, comment=why)
        if unset or "$(" in value:
            self._left.setdefault(name, why)
            self._open.add(name)
        else:
            self._decided.setdefault(name, []).append(key)

    def drop(self, name: str, why: str) -> None:
        """Report why a given argument is not carried over."""
        self._taken.add(name)
        if name in self.values:
            self._left[name] = why

    def wrong(self, name: str, what: str) -> None:
        """Note a mistake in the value of an argument."""
        self.problems.append(f"{self._file(name)}{self.label(name)}: {what}")

    def refuse(self, text: str) -> None:
        """Note that the run as a whole cannot be converted."""
        self.problems.append(text)

    def label(self, name: str) -> str:
        """Return an argument and its value as they were given."""
        if name.startswith("*"):  # of a Python file: **more
            return name
        flag, value = self.source.flag, self.values.get(name)
        name, present = self._older.get(name, name), name
        if value is None or (value is True and flag) or name == f"no_{present}":
            return f"{flag}{name}"
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        shown = report.plain(shown.lower() if isinstance(value, bool) else shown)
        shown = shown if len(shown) <= 60 else shown[:59].rstrip(" .") + "…"
        return f"{flag}{name}{' ' if flag else '='}{shown}"

    def why_unset(self, value: str) -> str:
        """Return why a text of the script is not known in full: a clause that names the variable or the command."""
        if inner := re.search(r"\$\{(oc\.env:\w[^{}]*|\.*\w+(?:\.\w+)+|\.+\w+)\}", value):
            return f"it refers to {inner[1]}, which is not given"
        return self.unknown.get(value) or why_left(value, self.variables, self.unknown)

    def finish(self) -> tuple[Config, str]:
        """Return the config and its YAML. Raises ValueError with one line for each mistake of the original run."""
        self._leftovers()
        if self.problems:
            raise ValueError("\n".join(dict.fromkeys(map(self._explained, self.problems))))
        raw: dict[str, dict[str, Any]] = {}
        for key, (value, _) in self.settings.items():
            section, name = key.split(".")
            raw.setdefault(section, {})[name] = value
        try:
            config = loader.from_dict(raw)
        except loader.ConfigError as error:
            labels = {key: self._file(name) + self.label(name) for key, name in self.origins.items()}
            lines = (self._explained(report.translated(line, labels)) for line in error.problems)
            raise ValueError("\n".join(lines)) from None
        return config, report.yaml_of(self.settings)

    def lists(self) -> tuple[list[Argument], list[Argument], list[Argument]]:
        """Return the arguments that are carried over, those that are not, with the reason, and the unknown ones.

        Each argument of the run is in exactly one of the lists.
        """
        carried: list[Argument] = []
        left: list[Argument] = []
        strange: list[Argument] = []
        for name in self.values:
            shown, given = self._older.get(name, name), self.label(name)
            if name in self._left:
                left.append(Argument(shown, given, tuple(self._decided.get(name, ())), self._left[name]))
            elif name in self._decided and name in self.doubted:
                why = "may change it: its value is known only when the script runs"
                why += "; the one that it is given is used instead"
                left.append(Argument(shown, given, tuple(self._decided[name]), f"{'; '.join(self.doubts)} {why}"))
            elif name in self._decided:
                carried.append(Argument(shown, given, tuple(self._decided[name])))
            elif self._is_known(name):
                left.append(Argument(shown, given, why="it changes nothing in this run"))
            else:
                strange.append(Argument(shown, self._file(name) + given))
        return carried, left, strange

    def open_arguments(self) -> list[str]:
        """Return the arguments whose value only running the script would tell, as they were given."""
        open_ = self._open | (self.doubted & {*self._decided})
        return [*(self.label(name) for name in self.values if name in open_), *self.doubts]

    # -- inside

    def _file(self, name: str) -> str:
        """Return the file that gives an argument, with a colon, if it is another than the script."""
        return f"{place}: " if (place := self.places.get(self._older.get(name, name))) else ""

    def _take(self, name: str) -> Any:
        self._taken.add(name)
        value = self.values.get(name)
        return None if isinstance(value, str) and value.strip() in NULLS else value

    def _number_text(self, name: str) -> Any:
        value = self._take(name)
        if is_unset(value):
            self._unset(name, value)
            return None
        if isinstance(value, list | Mapping):
            self.wrong(name, "must be one value")
            return None
        return value.strip().strip("'\"") if isinstance(value, str) else value

    def _unset(self, name: str, value: str, instead: str = _DEFAULT) -> None:
        why = f"{self.why_unset(value)}; {instead}"
        self._left.setdefault(name, why)
        self._open.add(name)
        if (line := f"{self.label(name)}: {why}") not in self.assumed:
            self.assumed.append(line)

    def _is_known(self, name: str) -> bool:
        return self.source.table.has(name) or name in self._taken

    def _leftovers(self) -> None:
        """Say why the arguments that decide nothing are not carried over; a near miss of a known name is a mistake."""
        for name, value in self.values.items():
            if name in self._left or name in self._decided:
                continue
            if name.startswith("*"):
                self._left[name] = "it may give any argument that is not listed, known only when the script runs"
                self._open.add(name)
                self.assumed.append(f"{name}: {self._left[name]}; defaults are used instead")
                continue
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            why = next((text for pattern, text in self.source.table.reasons.items() if fnmatch(name, pattern)), None)
            taken = name in self._taken and name not in self.source.table.blank
            if is_unset(text) and why is None and (taken or name in self.source.table.read):
                self._unset(name, text)
            elif not self._is_known(name):
                added = self.variables.get("added", "").split()  # by a + of Hydra, which makes a new key
                if name not in added and (nearest := misspelt(name, self.source.table.like(name))):
                    flag, place = self.source.flag, self._file(name)
                    self.refuse(f"{place}unknown argument {flag}{report.plain(name)}; nearest: {flag}{nearest}")
            elif is_null(value) and (keys := self.lost.get(name)):
                self._left[name] = report.null(value, keys, self.settings)
            elif (not value) if isinstance(value, list | Mapping) else (value is False or value in _OFF):
                here = (why and " always " in why) or name in self.source.table.on  # off there, and on here
                self._left[name] = (why or report.NO_COUNTERPART) if here else report.OFF
            else:
                blank = name not in self._taken or name in self.source.table.blank
                self._left[name] = why or (report.NO_COUNTERPART if blank else "it changes nothing in this run")

    def _explained(self, problem: str) -> str:
        """Return a mistake with the arguments in it whose values are not known: it may be one of their defaults."""
        for name in self.values:
            keys = [key for key, origin in self.origins.items() if origin == name]
            told = self._left.get(name, "").partition(";")[0]  # why it is not known
            named = [text for text in (name, *keys) if re.search(rf"(?<![\w.]){re.escape(text)}(?!\w)", problem)]
            if name in self._open and told not in problem and named:
                problem += f"; {self.label(name)}: {self._left[name].removesuffix(f'; {_DEFAULT}')}"
        return report.with_way_out(problem)
