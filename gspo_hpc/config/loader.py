"""Conversion of YAML and ``section.key=value`` settings to a :class:`~gspo_hpc.config.schema.Config`, and back.

Loading is strict: an unknown key, a wrong type or a value out of range is refused, all mistakes together, each on one
line with its place, what was given and what is allowed. Types and ranges stand in schema.py and the files of its
sections; nothing here knows a single key. Paths inside a config are left as they are: relative to the current
directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gspo_hpc.config import mistakes, paths, schema
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import as_dict, describe
from gspo_hpc.system.text import near_miss


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` holds one line for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a YAML file (None: only defaults) with ``section.key=value`` settings put over it.

    Raises ConfigError with every mistake of the file and of the overrides.
    """
    raw: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems: list[str] = []
    try:
        if path is not None:
            raw, places = _read_file(Path(path), problems)
        for text in overrides:
            _override(raw, text, places, problems)
        if profile := _profile(raw, lambda: _place(places, "slurm.profile", "config")):
            below, lines = _read_file(profile, problems)
            for name, section in below.items():
                raw[name] = section | (raw.get(name) or {})
            raw["slurm"]["profile"] = None  # it is part of the config now, and need not be there to load it again
            places = lines | places
        config = _read_config(raw, lambda key: _place(places, key, "config" if path is None else str(path)), problems)
    except RecursionError:
        raise ConfigError([f"{path or 'command line'}: nested too deeply"]) from None
    if problems or config is None:
        raise ConfigError(problems)
    return config


def from_dict(raw: Mapping[str, Any], where: str = "config") -> Config:
    """Return the config of nested sections, as read from YAML or JSON; `where` opens every line of a ConfigError."""
    problems: list[str] = []
    config = _read_config(raw, lambda key: where, problems)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def is_empty(path: str | Path) -> bool:
    """Return True for a file that has no key in any section. Raises ConfigError where it is no config."""
    problems: list[str] = []
    raw, _ = _read_file(Path(path), problems)
    return not problems and all(section is None or section == {} for section in raw.values())


def dump(config: Config) -> str:
    """Return the whole config as YAML, every key with its value; :func:`load` of it gives an equal config."""
    return yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True, width=120)


def _read_file(path: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections of a YAML file and the place ("file:line") of each of its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [str(p) for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError([f"{path}: no such config file{near_miss(str(path), names)}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    places: dict[str, str] = {}
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}, places
        for key, line in _lines(root, "", problems, path, set()):
            places.setdefault(key, f"{path}:{line}")
        raw = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError([f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}"]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: a config is made of sections, such as 'run:' and 'batch:'; found {describe(raw)}"])
    return {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}, places


def _profile(raw: Mapping[str, Any], place: Callable[[], str]) -> Path | None:
    """Return the file of slurm.profile: a path, or a name in slurm/profiles here or shipped with the package.

    Raises ConfigError, with the `place` of the setting, where there is none.
    """
    section = raw.get("slurm")
    given = section.get("profile") if isinstance(section, Mapping) else None
    if not isinstance(given, str):
        return None
    folders = (paths.PROFILES, Path("slurm", "profiles"))
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if "/" not in given and not given.endswith((".yaml", ".yml")):
        found, what, names = known.get(given), "profile", sorted(known)
    else:
        path = Path(given)
        beside = sorted(path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        found, what, names = path if path.exists() else None, "file", [str(one) for one in beside]
    if found is None:
        near = near_miss(given, names) or near_miss(Path(given).stem, known)
        what += f"{near}; known: {', '.join(sorted(known))}"
        raise ConfigError([f"{place()}: slurm.profile is {given!r}, but there is no such {what}"])
    return found


def _lines(node: Any, prefix: str, problems: list[str], path: Path, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield (dotted key, line) for every key below a YAML node.

    A key given twice is a mistake, since YAML keeps the last one.
    """
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _lines(child, prefix, problems, path, seen)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key_node, child in node.value:
            name, line = str(key_node.value), key_node.start_mark.line + 1
            if name in first:
                problems.append(f"{path}:{line}: {prefix}{name} is given twice (first on line {first[name]})")
            first.setdefault(name, line)
            yield f"{prefix}{name}", line
            yield from _lines(child, f"{prefix}{name}.", problems, path, seen)


def _override(raw: dict[str, Any], text: str, places: dict[str, str], problems: list[str]) -> None:
    """Put one ``section.key=value`` into `raw`; a key inside a free-form value takes more dots."""
    path, equals, given = text.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        problems.append(f"command line: {text!r} is not a setting; write section.key=value, such as run.max_steps=10")
        return
    try:
        value = yaml.safe_load(given)
    except (yaml.YAMLError, ValueError):
        problems.append(f"command line: {path}: {given!r} is not valid YAML; put quotes around text with : [ ] {{ }} #")
        return
    field = schema.field_at(parts)
    if isinstance(value, int | float) and field is not None and schema.plain_type(field.annotation) is str:
        value = given.strip()  # run.name=123 is a name
    inner: Any = raw
    for depth, part in enumerate(parts[:-1]):
        child = inner.get(part)
        if child is not None and not isinstance(child, dict):
            problems.append(f"command line: {path}: {'.'.join(parts[: depth + 1])} has no keys inside")
            return
        inner[part] = dict(child or {})  # a copy: a YAML alias may stand elsewhere too
        inner = inner[part]
    inner[parts[-1]] = value
    for stale in [key for key in places if key == ".".join(parts) or key.startswith(".".join(parts) + ".")]:
        del places[stale]
    places.setdefault(parts[0], "command line")
    places[".".join(parts)] = "command line"


def _place(places: Mapping[str, str], key: str, default: str) -> str:
    """Return the place of a key; inside lists and free-form values that of the nearest key around it."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    for length in range(len(parts), 0, -1):
        if (found := places.get(".".join(parts[:length]))) is not None:
            return found
    return default


def _read_config(raw: Mapping[str, Any], place: Callable[[str], str], problems: list[str]) -> Config | None:
    given = {name: {} if section is None else section for name, section in raw.items()}
    given = {name: dict(section) if isinstance(section, Mapping) else section for name, section in given.items()}
    try:
        return Config.model_validate({name: {} for name in Config.model_fields} | given)
    except ValidationError as error:
        problems += mistakes.lines(error, given, place)
        return None
