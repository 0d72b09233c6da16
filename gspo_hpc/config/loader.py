"""Conversion of YAML and ``section.key=value`` settings to a :class:`~gspo_hpc.config.schema.Config`, and back.

Loading is strict: an unknown key, a wrong type or a value out of range is refused, all mistakes together, each on one
line with its place, what was given and what is allowed. Types and ranges stand in schema.py and the files of its
sections; nothing here knows a single key. Paths inside a config are left as they are: relative to the current
directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from gspo_hpc.config import paths, plugins, schema
from gspo_hpc.config.paths import Part
from gspo_hpc.config.reading.config_yaml import Ambiguous, Reader, Writer, read_word
from gspo_hpc.config.reading.places import Places
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import as_dict, describe
from gspo_hpc.system.text import near_miss, nearest

_FORM = "write section.key=value, such as run.max_steps=10"
_SLIP, _LETTERS = 0.75, 2  # similarity of a key and its misspelling among all keys, and how many letters it may lack


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` holds one line for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(path: str | Path | None, overrides: Sequence[str] = (), *, run_code: bool = False) -> Config:
    """Return the config of a YAML file (None: only defaults) with ``section.key=value`` settings put over it.

    `run_code`: an algorithm in a user's file is run, for its defaults and its terms. Without it nothing that a config
    names is ever run. Raises ConfigError with every mistake of the file and of the overrides.
    """
    return load_with_places(path, overrides, run_code=run_code)[0]


def load_with_places(
    path: str | Path | None, overrides: Sequence[str] = (), *, run_code: bool = False
) -> tuple[Config, Places]:
    """Return what :func:`load` returns, and the places of the settings that are given."""
    raw: dict[str, Any] = {}
    places = Places()
    problems: list[str] = []
    try:
        if path is not None:
            raw, places = _read_file(Path(path), problems)
        for text in overrides:
            _override(raw, text, places, problems)
        if profile := _profile(raw, lambda: places.around("slurm.profile", "config")):
            below, lines = _read_file(profile, problems)
            for name, section in below.items():
                raw[name] = section | (raw.get(name) or {})
            raw["slurm"]["profile"] = None  # it is part of the config now, and need not be there to load it again
            places = Places(lines | places)
        around = "config" if path is None else str(path)
        config = _read_config(raw, lambda key: places.around(key, around), problems, run_code)
    except RecursionError:
        raise ConfigError([f"{path or 'command line'}: nested too deeply"]) from None
    if problems or config is None:
        raise ConfigError(problems)
    return config, places


def from_dict(raw: Mapping[str, Any], where: str = "config", *, run_code: bool = False) -> Config:
    """Return the config of nested sections, as read from YAML or JSON; `where` opens every line of a ConfigError."""
    problems: list[str] = []
    config = _read_config(raw, lambda key: where, problems, run_code)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def dump(config: Config) -> str:
    """Return the whole config as YAML, every key with its value; :func:`load` of it gives an equal config."""
    return str(yaml.dump(as_dict(config), Dumper=Writer, sort_keys=False, allow_unicode=True, width=120))


def given(config: Config) -> dict[str, Any]:
    """Return only the settings that were given, as nested values: defaults of the others may depend on them."""
    return config.model_dump(exclude_unset=True, warnings=False)


def dump_given(config: Config, given: Collection[str]) -> str:
    """Return as YAML only the settings that `given` names, dotted; those of a list or of a map are one setting.

    What belongs to an entry of a list is written where it was given.
    """
    whole, entries = as_dict(config), config.model_dump(exclude_unset=True, warnings=False)
    tops = {".".join(re.split(r"[.\[]", key)[:2]) for key in given}
    chosen = {
        name: {
            key: entries.get(name, {}).get(key, value) if isinstance(value, list | tuple) else value
            for key, value in section.items()
            if f"{name}.{key}" in tops
        }
        for name, section in whole.items()
    }
    sections = {name: section for name, section in chosen.items() if section}
    return str(yaml.dump(sections, Dumper=Writer, sort_keys=False, allow_unicode=True, width=120))


def _read_file(path: Part, problems: list[str]) -> tuple[dict[str, Any], Places]:
    """Return the sections of a YAML file and the place of each of its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [str(beside) for beside in paths.files(Path(str(path)).parent, ".yaml", ".yml")]
        raise ConfigError([f"{path}: no such config file{near_miss(str(path), names)}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    places = Places()
    try:
        reader = Reader(text)
        root = reader.get_single_node()
        if root is None:
            return {}, places
        for key, line, first in _lines(root, (), set()):
            places.setdefault(key, f"{path}:{line}")
            if first:
                problems.append(f"{path}:{line}: {key} is given twice (first on line {first})")
        raw = reader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError([f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}"]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: a config is made of sections, such as 'run:' and 'batch:'; found {describe(raw)}"])
    return {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}, places


def _profile(raw: Mapping[str, Any], place: Callable[[], str]) -> Part | None:
    """Return the file of slurm.profile: a path, or a name in slurm/profiles here or shipped with the package.

    Raises ConfigError, with the `place` of the setting, where there is none.
    """
    section = raw.get("slurm")
    given = section.get("profile") if isinstance(section, Mapping) else None
    if not isinstance(given, str):
        return None
    folders: tuple[Part, ...] = (paths.PROFILES, Path("slurm", "profiles"))
    known = {path.name.removesuffix(".yaml"): path for folder in folders for path in paths.files(folder, ".yaml")}
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


def _lines(node: yaml.Node, steps: tuple[str | int, ...], seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Yield (key, line, 0) for every key below a YAML node, and make words text where the schema wants text.

    A key that is given twice, of which YAML keeps the last one, has the line of the first in place of 0.
    """
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    read_word(node, text=_takes_text(steps))
    if isinstance(node, yaml.SequenceNode):
        for number, child in enumerate(node.value):
            yield _key((*steps, number)), child.start_mark.line + 1, 0
            yield from _lines(child, (*steps, number), seen)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key_node, child in node.value:
            name, line = str(key_node.value), key_node.start_mark.line + 1
            yield _key((*steps, name)), line, first.get(name, 0)
            first.setdefault(name, line)
            yield from _lines(child, (*steps, name), seen)


def _key(steps: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _takes_text(steps: Sequence[str | int]) -> bool:
    """Return whether the schema wants text at a path: any, or one of a few words."""
    kind = schema.kind_at(steps)
    return kind is str or (get_origin(kind) is Literal and all(isinstance(value, str) for value in get_args(kind)))


def _override(raw: dict[str, Any], text: str, places: Places, problems: list[str]) -> None:
    """Put one ``section.key=value`` into `raw`; a key inside a free-form value takes more dots."""
    path, equals, given = text.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        problems.append(f"command line: {text!r} is not a setting; {_meant(path.strip()) if equals else _FORM}")
        return
    try:
        value = read_value(parts, given)
    except ValueError as error:
        problems.append(f"command line: {path}: {error}")
        return
    inner: Any = raw
    for depth, part in enumerate(parts[:-1]):
        child = inner.get(part)
        if child is not None and not isinstance(child, dict):
            problems.append(f"command line: {path}: {'.'.join(parts[: depth + 1])} has no keys inside")
            return
        inner[part] = dict(child or {})  # a copy: a YAML alias may stand elsewhere too
        inner = inner[part]
    inner[parts[-1]] = value
    places.override(".".join(parts))


def _meant(name: str) -> str:
    """Return what to write instead of a name without a section: a key of that name, ours for another project's.

    For a misspelt one that is the nearest key.
    """
    from gspo_hpc.config.reading.peer_names import here  # only here: most settings are right

    keys: dict[str, list[str]] = {}
    for key in schema.keys():
        keys.setdefault(key.partition(".")[2], []).append(key)
    if own := keys.get(name):
        return f"write {' or '.join(own)}"
    if ours := here(name):
        return f"here it is {ours}"
    slips = [key for key in keys if abs(len(key) - len(name)) <= _LETTERS]
    near = None if nearest(name, Config.model_fields, cutoff=_SLIP) else nearest(name, slips, cutoff=_SLIP)
    return _FORM if near is None else f"write section.key=value; nearest: {' or '.join(keys[near])}"


def read_value(key: Sequence[str], given: str) -> Any:
    """Return the value of a setting, as it stands behind ``section.key=``. Raises ValueError if it is not YAML."""
    try:
        reader = Reader(given)
        if (node := reader.get_single_node()) is None:
            return None
        if twice := [name for name, _, first in _lines(node, tuple(key), set()) if first]:
            raise ValueError(f"the key {twice[0]} is given twice")
        value = reader.construct_document(node)
    except yaml.YAMLError:
        raise ValueError(f"{given!r} is not valid YAML; put quotes around text with : [ ] {{ }} #") from None
    if isinstance(value, int | float | Ambiguous) and _takes_text(key):
        return given.strip()  # run.name=123 is a name
    return value


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Return a config with ``section.key=value`` settings put over it. Raises ConfigError with every mistake."""
    raw = given(config)
    places, problems = Places(), list[str]()
    for text in settings:
        _override(raw, text, places, problems)
    changed = _read_config(raw, lambda key: places.around(key, "config"), problems, True)
    if problems or changed is None:
        raise ConfigError(problems)
    return changed


def _read_config(
    raw: Mapping[str, Any], place: Callable[[str], str], problems: list[str], run_code: bool
) -> Config | None:
    given = {name: {} if section is None else section for name, section in raw.items()}
    given = {name: dict(section) if isinstance(section, Mapping) else section for name, section in given.items()}
    try:
        whole = {name: {} for name in Config.model_fields} | given
        return Config.model_validate(whole, context={plugins.RUN_CODE: run_code})
    except ValidationError as error:
        from gspo_hpc.config import mistakes  # only here: most configs have none

        problems += mistakes.lines(error, given, place)
        return None
