"""Read the tables of other projects' arguments, ``arguments/*.yaml``: each names our key, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import resources
from typing import Any

from gspo_hpc.config import loader, yaml_text
from gspo_hpc.config.schema import Config

_KEY = re.compile(r"[a-z_]+\.[a-z0-9_]+")


@dataclass(frozen=True)
class Table:
    """Table of what becomes of each argument of another project."""

    known: frozenset[str]  # names of arguments
    free: tuple[str, ...]  # patterns of further names
    copied: Mapping[str, tuple[str, Any]]  # name -> (our key, the project's default or None)
    nulls: Mapping[str, Any]  # name -> the value of our key where it is null
    reasons: Mapping[str, str]  # name or pattern -> why it is not carried over
    renamed: Mapping[str, str]  # earlier name -> present name
    blank: frozenset[str]  # names without a counterpart and without a sentence
    on: frozenset[str]  # names that are on unless they are switched off: off is not what is absent here
    below: Mapping[str, frozenset[str]]  # pattern -> the names below it; without an entry, any name

    @property
    def read(self) -> frozenset[str]:
        """The names whose value a converter reads, so that it says where the value is not known."""
        return self.known - self.blank - self.reasons.keys()

    def has(self, name: str) -> bool:
        """Tell whether the project has an argument of this name."""
        found = name in self.known
        for pattern in self._free_of(name):
            found = found or pattern not in self.below or _below(name, pattern) in self.below[pattern]
        return found

    def like(self, name: str) -> frozenset[str]:
        """Return the names that `name` may be a misspelling of."""
        found = set(self.known)
        for pattern in self._free_of(name):
            end = _below(name, pattern)
            found |= {name.removesuffix(end) + other for other in self.below.get(pattern, ())}
        return frozenset(found)

    def _free_of(self, name: str) -> list[str]:
        return [pattern for pattern in self.free if fnmatch(name, pattern)]


def _below(name: str, pattern: str) -> str:
    """Return the part of a name that the last star of a pattern stands for: of a.fsdp_config.b, it is b."""
    return name.partition(pattern.strip("*"))[2]


@cache
def load(project: str) -> Table:
    """Return the table of "swift", "swift_hf", "verl" or "trl". Raises ValueError, with the argument, for a mistake."""
    text = resources.files("gspo_hpc.importers").joinpath("arguments", f"{project}.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml_text.read_shipped(text)
    copied: dict[str, tuple[str, Any]] = {}
    nulls: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    renamed: dict[str, str] = {}
    on = {name for name, value in raw.items() if isinstance(value, dict) and {*value} <= {"why", "default"}}
    raw |= {name: raw[name].get("why") for name in on}
    for name, value in raw.items():
        match value:
            case {"renamed": str(other)} if other in raw:
                renamed[name] = other
            case {"key": str(key), "default": default} if default_of(key, name) is not _MISSING:
                copied[name] = (key, default)
                nulls |= {name: value["null"]} if "null" in value else {}
            case str() if _KEY.fullmatch(value) and default_of(value, name) is not _MISSING:
                copied[name] = (value, None)
            case str() if " " in value:
                reasons[name] = value
            case None | "code":
                pass
            case _:
                raise ValueError(f"arguments/{project}.yaml: {name}: {value!r} is no key of the config and no sentence")
    return Table(
        known=frozenset(name for name in raw if "*" not in name),
        free=tuple(name for name in raw if "*" in name),
        copied=copied,
        nulls=nulls,
        reasons=reasons,
        renamed=renamed,
        blank=frozenset(name for name, value in raw.items() if value is None),
        on=frozenset(on),
        below=_names(project),
    )


def _names(project: str) -> dict[str, frozenset[str]]:
    """Return the names below the patterns of a table, of the projects that have a file of them."""
    file = resources.files("gspo_hpc.importers").joinpath("arguments", f"{project}_names.yaml")
    if not file.is_file():
        return {}
    raw: dict[str, list[str]] = yaml_text.read_shipped(file.read_text(encoding="utf-8"))
    return {pattern: frozenset(names) for pattern, names in raw.items()}


_MISSING = object()


def default_of(key: str, name: str = "") -> Any:
    """Return our default of a ``section.key``. Raises ValueError, with the argument `name`, if there is no such key."""
    section, _, last = key.partition(".")
    found = getattr(getattr(Config(), section, None), last, _MISSING)
    if found is _MISSING:
        raise ValueError(f"{name}: {key} is no key of the config")
    return found


@cache
def kind_of(key: str) -> type:
    """Return the type of a key's values: bool, int, float, list or str."""
    default = default_of(key)
    if default is not None:
        return list if isinstance(default, tuple) else type(default)
    samples: list[tuple[type, Any]] = [(bool, True), (float, 0.5), (int, 1), (list, ["x"])]
    return next((kind for kind, sample in samples if _fits(key, sample)), str)


@cache
def least_of(key: str) -> int:
    """Return the smallest whole number that a key takes, as far as -1, 0 and 1 go."""
    return next((least for least in (-1, 0) if _fits(key, least)), 1)


def _fits(key: str, value: Any) -> bool:
    section, _, last = key.partition(".")
    try:
        loader.from_dict({section: {last: value}})
    except loader.ConfigError:
        return False
    return True
