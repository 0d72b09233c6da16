"""Collect the settings that another project's run amounts to, and a report of what is not carried over.

A converter reads arguments by name, which checks them, and puts settings of ours. Arguments that it never read are
reported, so that nothing of the original run is lost silently.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from gspo_hpc.config import loader, yaml_text
from gspo_hpc.config.schema import Config
from gspo_hpc.importers import tables
from gspo_hpc.importers.tables import Table
from gspo_hpc.importers.words import is_unset
from gspo_hpc.system.text import near_miss, nearest

_OURS = Config()
_WIDTH = 118
_NEAR = 0.86  # how alike a typo is: --global_batch_sise is, --vllm_max_num_seqs and --max_num_seqs are not
_OFF: tuple[Any, ...] = (None, False, "false", "False", "null", "None", "none", "", "disabled", [], {})
_TRUE, _FALSE = ("true", "1", "yes", "y", "t"), ("false", "0", "no", "n", "f")


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
        self.dropped: list[str] = []  # what has no counterpart
        self.problems: list[str] = []
        self._taken: set[str] = set()
        self._older: dict[str, str] = {}

    def rename(self) -> None:
        """Read arguments that had another name in earlier versions by their present one."""
        for older, name in self.source.table.renamed.items():
            if older in self.values and name not in self.values:
                self.values[name] = self.values.pop(older)
                self._older[name] = older

    def copy(self) -> None:
        """Put the arguments whose value is the value of one key of ours, as the project's table lists them."""
        for name, (key, default) in self.source.table.copied.items():
            kind = tables.kind_of(key)
            value: Any
            if default is None and not self.given(name):
                continue
            if kind is bool:
                value = self.switch(name, default)
            elif kind is int:
                value = self.whole(name, default, tables.least_of(key))
            elif kind is float:
                value = self.number(name, default)
            else:
                value = self.texts(name) if kind is list else self.text(name, default)
            if value is not None:
                self.put(key, value, name)

    # -- what is given

    def given(self, name: str) -> bool:
        """Tell whether the argument is given with a value that is known."""
        return self.values.get(name) is not None and not is_unset(self.values[name])

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the text of an argument; a shell variable may still stand in it."""
        value = self._take(name)
        if value is None or isinstance(value, bool | list | Mapping):
            if value not in (None, True, []):
                self.wrong(name, "must be one text")
            return default
        return str(value)

    def texts(self, name: str) -> list[str]:
        """Return the texts of an argument that takes several."""
        value = self._take(name)
        if isinstance(value, str) and value.startswith("["):  # a list as Hydra writes it
            inner = _yaml(value)
            value = inner if isinstance(inner, list) else value
        if value is None or isinstance(value, bool | Mapping):
            return []
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """Return a whole number; `default` if it is not given, null, or a variable whose value is not known."""
        value = self._number_text(name)
        if value is None:
            return default
        try:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            number = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(float(value))
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
            self.wrong(name, f"must be one of {', '.join(allowed)}{near_miss(value, allowed)}")
            return default
        return value

    def skip(self, *patterns: str) -> None:
        """Mark arguments as read that nothing needs to be said about."""
        for name in self.values:
            if any(fnmatch(name, pattern) for pattern in patterns):
                self._taken.add(name)

    # -- what becomes of it

    def put(self, key: str, value: Any, name: str | None = None, comment: str = "") -> None:
        """Set a key of ours.

        `name` is the argument that it came from. If that is not given, a comment says that the value is the other
        project's default, and the line is left out if our default is the same.
        """
        if name is not None and name not in self._taken:
            self._taken.add(name)
        if name is not None and not self.given(name):
            if value == tables.default_of(key) and not comment:
                return
            comment = f"default of {self.source.project}" + (f"; {comment}" if comment else "")
        self.settings[key] = (value, comment)
        if name is not None:
            self.origins[key] = name

    def drop(self, name: str, why: str) -> None:
        """Report why a given argument is not carried over."""
        self._taken.add(name)
        if name in self.values:
            self.dropped.append(f"{self.label(name)}: {why}")

    def wrong(self, name: str, what: str) -> None:
        """Note a mistake in the value of an argument."""
        self.problems.append(f"{self.label(name)}: {what}")

    def refuse(self, text: str) -> None:
        """Note that the run as a whole cannot be converted."""
        self.problems.append(text)

    def label(self, name: str) -> str:
        """Return an argument and its value as they were given."""
        flag, value = self.source.flag, self.values.get(name)
        name = self._older.get(name, name)
        if value is None or (value is True and flag):
            return f"{flag}{name}"
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        shown = _plain(shown.lower() if isinstance(value, bool) else shown)
        shown = shown if len(shown) <= 60 else shown[:59].rstrip(" .") + "…"
        return f"{flag}{name}{' ' if flag else '='}{shown}"

    def why_unset(self, value: str) -> str:
        """Return why a text of the script is not known in full: a clause that names the variable or the command."""
        found = re.findall(r"\$\{?[#!]?(\w+)", value)
        for name in found:
            if why := self.unknown.get(name) or self.unknown.get("*"):
                return f"${name} {why}"
        if found:
            return f"${found[0]} is not set in the script"
        return "its value is known only when the script runs"

    def finish(self) -> tuple[Config, str]:
        """Return the config and its YAML. Raises ValueError with one line for each mistake of the original run."""
        self._leftovers()
        self._report_unset()
        if self.problems:
            raise ValueError("\n".join(dict.fromkeys(self.problems)))
        raw: dict[str, dict[str, Any]] = {}
        for key, (value, _) in self.settings.items():
            section, name = key.split(".")
            raw.setdefault(section, {})[name] = value
        try:
            config = loader.from_dict(raw)
        except loader.ConfigError as error:
            raise ValueError("\n".join(self._translated(line) for line in error.problems)) from None
        return config, self._yaml()

    # -- inside

    def _take(self, name: str) -> Any:
        self._taken.add(name)
        value = self.values.get(name)
        return None if isinstance(value, str) and value.strip() in ("null", "None", "~") else value

    def _number_text(self, name: str) -> Any:
        value = self._take(name)
        if is_unset(value):
            self._unset(name, value)
            return None
        if isinstance(value, list | Mapping):
            self.wrong(name, "must be one value")
            return None
        return value.strip().strip("'\"") if isinstance(value, str) else value

    def _unset(self, name: str, value: str) -> None:
        line = f"{self.label(name)}: {self.why_unset(value)}; its default is used instead"
        if line not in self.assumed:
            self.assumed.append(line)

    def _report_unset(self) -> None:
        """List the arguments whose value is not known, and of which nothing was said yet."""
        kept = [yaml_text.write_line(value) for value, _ in self.settings.values()]
        for name, value in self.values.items():
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            said = any(self.label(name) in line for line in (*self.assumed, *self.dropped, *self.problems))
            if is_unset(text) and not said and not any(text in shown for shown in kept):
                self._unset(name, text)

    def _leftovers(self) -> None:
        """Report the arguments that nothing has read; a near miss of a known name is a mistake."""
        alike: dict[str, list[str]] = {}
        plain: list[str] = []
        off: list[str] = []
        strange: list[str] = []
        for name, value in self.values.items():
            if name in self._taken:
                continue
            known = name in self.source.table.known or any(fnmatch(name, pattern) for pattern in self.source.table.free)
            if is_unset(value) and known:
                self._unset(name, value)
            elif not known:
                if nearest := _near(name, self.source.table.known):
                    flag = self.source.flag
                    self.refuse(f"unknown argument {flag}{_plain(name)}; nearest: {flag}{nearest}")
                else:
                    strange.append(self.label(name))
            elif (
                isinstance(value, list | Mapping) and not value or not isinstance(value, list | dict) and value in _OFF
            ):
                off.append(f"{self.source.flag}{name}")
            else:
                why = next(
                    (text for pattern, text in self.source.table.reasons.items() if fnmatch(name, pattern)), None
                )
                if why is None:
                    plain.append(self.label(name))
                else:
                    alike.setdefault(why, []).append(self.label(name))
        self.dropped += [f"{'; '.join(labels)}: {why}" for why, labels in alike.items()]
        if plain:
            self.dropped.append("these have no counterpart here: " + "; ".join(plain))
        if off:
            self.dropped.append("switched off in the original run, and absent here: " + ", ".join(off))
        if strange:
            self.dropped.append(f"not known as arguments of {self.source.project}: " + "; ".join(strange))

    def _translated(self, line: str) -> str:
        """Return a mistake in a key of ours as one of the argument that it came from."""
        text = line.removeprefix("config: ")
        for key, name in self.origins.items():
            if text.startswith(f"{key} "):
                return f"{self.label(name)}: {text.removeprefix(key).strip()} ({key})"
        return text

    def _yaml(self) -> str:
        lines: list[str] = []
        for section in Config.model_fields:
            names = type(getattr(_OURS, section)).model_fields
            keys = [key for name in names if (key := f"{section}.{name}") in self.settings]
            if not keys:
                continue
            lines += ["", f"{section}:"]
            for key in keys:
                value, comment = self.settings[key]
                comment = _plain(comment)
                line = f"  {key.split('.')[1]}: {yaml_text.write_line(value)}"
                if comment and len(line) + len(comment) + 3 > _WIDTH:
                    lines += [f"  # {part}" for part in _wrapped(comment, _WIDTH - 4)]
                    comment = ""
                lines.append(line + (f" # {comment}" if comment else ""))
        return "\n".join(lines) + "\n"


def comments(title: str, items: Sequence[str]) -> list[str]:
    """Return a block of YAML comments: a title and one item a line, wrapped."""
    if not items:
        return []
    lines = ["#", f"# {title}"]
    for item in items:
        first, *more = _wrapped(item, _WIDTH - 6) or [""]
        lines += [f"#   {first}", *(f"#     {part}" for part in more)]
    return lines


def _near(name: str, known: Collection[str]) -> str | None:
    """Return the known name that this one is a typo of; in a dotted name the typo is in the end or before it."""
    section, dot, end = name.rpartition(".")
    if not dot:
        return nearest(name, known, _NEAR)
    ends = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    if found := nearest(end, ends, _NEAR):
        return f"{section}.{found}"
    sections = [other.rpartition(".")[0] for other in known if other.rpartition(".")[2] == end]
    found = nearest(section, sections, _NEAR)
    return f"{found}.{end}" if found else None


def _plain(text: str) -> str:
    """Return a text as one line of printable characters."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in _plain(text).split():
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _yaml(text: str) -> Any:
    try:
        return yaml_text.read(text)
    except ValueError:
        return None
