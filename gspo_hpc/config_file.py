"""From YAML and ``section.key=value`` to a :class:`~gspo_hpc.config.Config`, and back.

Strict: an unknown key, a wrong type or a value out of range is refused, all mistakes together, each on one line with
where it stands, what was given and what is allowed. Types come from the annotations in config.py; nothing here knows a
single key, except the table of ranges. Paths inside a config are left as they are: relative to the current directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from gspo_hpc.config import Config

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# A whole number is at least 1 and a number at least 0, unless it stands here. List positions are left out of keys.
# A whole number beyond these is a slip of the hand, and nothing that counts with it may run for minutes.
_MOST = 10**9
_MAXIMA = {
    "cluster.nodes": 100_000,  # several times the largest machines there are
    "cluster.gpus_per_node": 256,  # racks that work as one node have 72; on CPUs a rank for each core at most
    "rollout.tensor_parallel_size": 256,  # both stay on a node
    "rollout.engines_per_node": 256,
    "run.seed": 2**63 - 1,
}
_ANY = (lambda v: True, "")
_FROM_0 = (lambda v: v >= 0, "must be 0 or more")
_ABOVE_0 = (lambda v: v > 0, "must be above 0")
_BELOW_1 = (lambda v: 0 <= v < 1, "must be at least 0 and below 1")
# vLLM refuses above 2, and takes 0.01 for anything between it and 0 without a word that reaches the trainer.
_TEMPERATURE = (lambda v: 0.01 <= v <= 2, "must be at least 0.01 and at most 2: vLLM samples at no other")
_ONE_LINE = (lambda v: v.isprintable() and v != "", "must be one line of text")
# What a line of #SBATCH carries: nothing there that a shell or sbatch itself takes for a quote, a command or an escape.
SBATCH_VALUE = re.compile(r"[A-Za-z0-9 _.,:@%+=/\[\]()|&*!~^-]+")
_SBATCH = (lambda v: SBATCH_VALUE.fullmatch(v) is not None, f"must be made of {SBATCH_VALUE.pattern[:-1]}")
_SBATCH_TEXTS = (
    *("partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist", "mem", "gres", "gpu_bind"),
    *("mail_user", "mail_type", "comment"),
)
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "run.name": (
        lambda v: _RUN_NAME.fullmatch(v) is not None,
        "must be 1 to 100 letters, digits, '.', '_' or '-', and begin with a letter or digit",
    ),
    "run.dir": (lambda v: "\0" not in v and v.splitlines() == [v], "must be a path without line breaks"),
    "run.seed": (lambda v: 0 <= v < 2**63, "must be at least 0 and below 2**63"),
    "cluster.network_gb_per_s": _ABOVE_0,
    "rollout.temperature": _TEMPERATURE,
    "rollout.top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "rollout.top_k": (lambda v: v == -1 or v >= 1, "must be 1 or more, or -1 for all tokens"),
    "rollout.kv_cache_gb": _ABOVE_0,
    "rollout.sleep_level": (lambda v: v in (1, 2), "must be 1 (weights wait in host memory) or 2 (they are dropped)"),
    "reward.timeout": _ABOVE_0,
    "reward.functions.function": (lambda v: v.strip() == v != "", "must name a function"),
    "reward.functions.weight": _ANY,
    "optimizer.lr_warmup_steps": _FROM_0,
    "optimizer.adam_beta1": _BELOW_1,
    "optimizer.adam_beta2": _BELOW_1,
    "optimizer.adam_eps": _ABOVE_0,
    "tracking.samples": _FROM_0,
    "eval.temperature": _TEMPERATURE,
    "faults.max_engine_restarts": _FROM_0,
    "faults.max_skipped_steps": _FROM_0,
    "faults.engine_timeout": _ABOVE_0,
    "faults.max_restarts": _FROM_0,
    "faults.bringup_timeout": _ABOVE_0,
    "faults.heartbeat_timeout": _ABOVE_0,
    "faults.hang_timeout": _ABOVE_0,
    **{f"slurm.{key}": _ONE_LINE for key in ("profile", "setup", "srun", "modules", "python")},
    **{f"slurm.container.{key}": _ONE_LINE for key in ("image", "mounts", "python", "args")},
    **{f"slurm.{key}": _SBATCH for key in _SBATCH_TEXTS},
}


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` holds one line for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class _Wrong(Exception):
    """One value that does not fit its key."""


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file (None: only defaults) with ``section.key=value`` settings put over it.

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
        if profile := _profile(raw):
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
    """The config of nested sections, as read from YAML or JSON. `where` opens every line of a ConfigError."""
    problems: list[str] = []
    config = _read_config(raw, lambda key: where, problems)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def dump(config: Config) -> str:
    """The whole config as YAML, every key with its value: :func:`load` of it gives an equal config."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True, width=120)


def _read_file(path: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections of a YAML file and the place ("file:line") of each of its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [str(p) for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError([f"{path}: no such config file{_nearest(str(path), names)}"]) from None
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
        raise ConfigError([f"{path}: a config is made of sections, such as 'run:' and 'batch:'; found {_say(raw)}"])
    return {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}, places


def _profile(raw: Mapping[str, Any]) -> Path | None:
    """The file of slurm.profile: a path, or a name in slurm/profiles here or beside the package."""
    section = raw.get("slurm")
    given = section.get("profile") if isinstance(section, Mapping) else None
    if not isinstance(given, str):
        return None
    if "/" in given or given.endswith((".yaml", ".yml")):
        return Path(given)
    places = [folder / "slurm" / "profiles" / f"{given}.yaml" for folder in (Path(), Path(__file__).parents[1])]
    return next((path for path in places if path.exists()), places[0])


def _lines(node: Any, prefix: str, problems: list[str], path: Path, seen: set[int]) -> Iterator[tuple[str, int]]:
    """(dotted key, line) of every key below a YAML node; a key given twice is a mistake, since YAML keeps the last."""
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
    """Puts one ``section.key=value`` into `raw`. A key inside a free-form value takes more dots."""
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
    hint = _keys().get(".".join(parts))
    if isinstance(value, int | float) and hint in (str, str | None):
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
    """Where a key was given; inside lists and free-form values the nearest key around it."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    for length in range(len(parts), 0, -1):
        if (found := places.get(".".join(parts[:length]))) is not None:
            return found
    return default


@cache
def _keys() -> dict[str, Any]:
    """Type of every ``section.key``."""
    return {f"{name}.{key}": hint for name, kind in _hints(Config).items() for key, hint in _hints(kind).items()}


def _read_config(raw: Mapping[str, Any], place: Callable[[str], str], problems: list[str]) -> Config | None:
    sections: dict[str, Any] = {}
    for name, value in raw.items():
        kind = _hints(Config).get(name) if isinstance(name, str) else None
        if kind is None:
            nearest = _nearest(str(name), [*_hints(Config), *_keys()])
            problems.append(f"{place(str(name))}: unknown section {name!r}{nearest or _allowed(_hints(Config))}")
        elif value is not None and not isinstance(value, Mapping):
            problems.append(f"{place(name)}: {name} is a section of keys; found {_say(value)}")
        else:
            sections[name] = _read_section(kind, value or {}, name, place, problems)
    if problems:
        return None
    config = Config(**sections)
    if None in config.rollout.engine.values():  # null: vLLM's own default
        given = {name: value for name, value in config.rollout.engine.items() if value is not None}
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=given))
    if config.optimizer.min_lr > config.optimizer.lr:
        problems.append(
            f"{place('optimizer.min_lr')}: optimizer.min_lr ({config.optimizer.min_lr}) must not be above "
            f"optimizer.lr ({config.optimizer.lr})"
        )
    return config


def _read_section(
    kind: Any, raw: Mapping[Any, Any], path: str, place: Callable[[str], str], problems: list[str]
) -> Any:
    hints = _hints(kind)
    values: dict[str, Any] = {}
    failed = False
    for name, given in raw.items():
        key = f"{path}.{name}"
        if name not in hints:
            nearest = _nearest(str(name), list(hints), f"{path}.") or _elsewhere(str(name))
            problems.append(f"{place(key)}: unknown key {key}{nearest or _allowed(hints)}")
            continue
        try:
            values[name] = _read_value(given, hints[name], key, place, problems)
        except _Wrong as error:
            problems.append(f"{place(key)}: {key} {error}")
            failed = True
    for item in dataclasses.fields(kind):
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in raw:
            problems.append(f"{place(path)}: {path}.{item.name} is missing")
            failed = True
    return None if failed else kind(**values)


def _read_value(given: Any, hint: Any, key: str, place: Callable[[str], str], problems: list[str]) -> Any:
    """`given` as the type `hint`. Raises _Wrong with the end of a sentence that opens with the key."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if given is None:
            return None
        (hint,) = [arg for arg in args if arg is not type(None)]
        return _read_value(given, hint, key, place, problems)
    if origin is Literal:
        if not isinstance(given, str) or given not in args:
            raise _Wrong(f"is {given!r}, which is not allowed{_nearest(str(given), args)}{_allowed(args)}")
        return given
    if origin is tuple:
        if not isinstance(given, list | tuple):
            raise _Wrong(f"must be a list; found {_say(given)}")
        items = []
        for number, item in enumerate(given):
            if args[0] in (str, int):
                items.append(_in_range(_read_scalar(item, args[0]), args[0], f"{key}[{number}]"))
                continue
            if not isinstance(item, Mapping):
                raise _Wrong(f"[{number}] must be a mapping of keys; found {_say(item)}")
            items.append(_read_section(args[0], item, f"{key}[{number}]", place, problems))
        return tuple(items)
    if origin is dict or dataclasses.is_dataclass(hint):
        if not isinstance(given, Mapping):
            raise _Wrong(f"must be a mapping; found {_say(given)}")
        if origin is not dict:
            return _read_section(hint, given, key, place, problems)
        return (
            {name: _read_scalar(value, str) for name, value in _plain(given).items()}
            if args[1] is str
            else _plain(given)
        )
    return _in_range(_read_scalar(given, hint), hint, key)


def _read_scalar(given: Any, hint: type) -> Any:
    if hint is float:
        try:  # YAML reads 1e-6, without a point, as text
            number = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not math.isfinite(number):
            raise _Wrong(f"must be a number; found {_say(given)}")
        return number
    if not isinstance(given, hint) or (hint is int and isinstance(given, bool)):
        name = {int: "a whole number", bool: "true or false", str: "text"}[hint]
        quotes = "; put quotes around it" if hint is str and isinstance(given, int | float) else ""
        raise _Wrong(f"must be {name}; found {_say(given)}{quotes}")
    return given


def highest(key: str) -> int:
    """The largest whole number that a dotted key takes."""
    return _MAXIMA.get(key, _MOST)


def _in_range(value: Any, hint: type, key: str) -> Any:
    default = {int: (lambda v: v >= 1, "must be 1 or more"), float: _FROM_0}.get(hint, _ANY)
    name = re.sub(r"\[\d+\]", "", key)
    holds, rule = _RANGES.get(name, default)
    if not holds(value):
        raise _Wrong(f"{rule}; found {value!r}")
    if hint is int and value > highest(name):
        raise _Wrong(
            f"must be at most {highest(name)}; found {value if value < 10**18 else f'{len(str(value))} digits'}"
        )
    return value


def _plain(value: Any) -> Any:
    """A deep copy of free-form values that survives YAML and JSON unchanged."""
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise _Wrong(f"has the key {bad[0]!r}; keys must be text: put quotes around it")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _Wrong(f"holds {_say(value)}; allowed: text, finite numbers, true, false, null, lists, mappings")


def _say(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping | list | tuple):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return f"{value!r}" if isinstance(value, str | int | float) else f"{value} ({type(value).__name__})"


def _nearest(given: str, names: Sequence[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return f"; nearest: {prefix}{found[0]}" if found else ""


def _elsewhere(name: str) -> str:
    """Keys of that name in other sections."""
    found = [key for key in _keys() if key.split(".")[1] == name]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _allowed(names: Any) -> str:
    return f"; allowed: {', '.join(str(name) for name in names)}"
