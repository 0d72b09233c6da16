"""Every setting of a config with its meaning, allowed values and default, and a search among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gspo_hpc.config import plugins
from gspo_hpc.config.reading import peer_names
from gspo_hpc.config.reference.json_schema import json_schema
from gspo_hpc.config.section import MOST, written
from gspo_hpc.system.text import nearest

_OWN = "path/to/file.py:Class"  # the name of an algorithm in a user's file
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


@dataclass(frozen=True)
class Setting:
    """A key of a config."""

    key: str  # section.key
    values: str  # what it may be: "whole number, at least 1, or null"
    default: str  # as on a command line; algorithms may differ: "0.2 (grpo), 0.0003 (gspo)"
    meaning: str
    choices: tuple[str, ...]  # the only values, as on a command line; empty where there are others


@cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by its key, in the order of the sections of a config."""
    whole = json_schema()
    found: dict[str, Setting] = {}
    for section, place in whole["properties"].items():
        if section == "algorithm":
            found |= _algorithms(whole["$defs"])
            continue
        part = whole["$defs"][place["$ref"].rpartition("/")[2]]
        for name, one in part["properties"].items():
            found[f"{section}.{name}"] = _setting(f"{section}.{name}", one, whole["$defs"])
    return found


def search(word: str) -> list[Setting]:
    """Return the settings that a word means, best first.

    These are the setting of that name; those that another project calls so; those whose key has the word; and those
    whose meaning has all words of the text. If there are none, it is the setting with the nearest name.
    """
    known, asked = settings(), word.strip().lower()
    here = peer_names.here(asked) or ""
    words = asked.split()
    tests: tuple[Callable[[Setting], bool], ...] = (
        lambda one: asked in (one.key, _last(one.key)),
        lambda one: re.search(rf"\b{re.escape(one.key)}\b", here) is not None,
        lambda one: asked.replace(" ", "_") in one.key,
        lambda one: all(part in f"{one.key} {one.meaning}".lower() for part in words),
    )
    found = dict.fromkeys(one.key for fits in tests for one in known.values() if words and fits(one))
    if not found and (near := nearest(asked, known) or nearest(_last(asked), [_last(key) for key in known])):
        found = dict.fromkeys(key for key in known if near in (key, _last(key)))
    return [known[key] for key in found]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _setting(key: str, one: Mapping[str, Any], shapes: Mapping[str, Any]) -> Setting:
    return Setting(key, _values(one, shapes), _default(one), one.get("description", ""), _choices(one))


def _algorithms(shapes: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of all algorithms, each once, with the defaults and meanings of those that have it."""
    kinds = plugins.algorithms()
    parts = {name: shapes[kind.__name__]["properties"] for name, kind in kinds.items()}
    found = {}
    for name in dict.fromkeys(key for part in parts.values() for key in part):
        key = f"algorithm.{name}"
        if name == "name":
            about = "; ".join(f"{kind}: {part[name]['description'].rstrip('.')}" for kind, part in parts.items())
            about += f"; one in a file of your own: {_OWN}"
            found[key] = Setting(key, f"{', '.join(kinds)}, or {_OWN}", plugins.DEFAULT, about, tuple(kinds))
            continue
        having = {kind: part[name] for kind, part in parts.items() if name in part}
        defaults: dict[str, list[str]] = {}
        for kind, one in having.items():
            defaults.setdefault(_default(one), []).append(kind)
        several = len(defaults) > 1 or len(having) < len(parts)
        default = ", ".join(f"{text} ({', '.join(kind)})" if several else text for text, kind in defaults.items())
        first = _setting(key, next(iter(having.values())), shapes)
        found[key] = Setting(key, first.values, default, first.meaning, first.choices)
    return found


def _default(one: Mapping[str, Any]) -> str:
    default = one.get("default")
    return "{}" if default == {} else written(tuple(default) if isinstance(default, list) else default)


def _choices(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the only values that a key may have, or none if there are others."""
    parts = one.get("anyOf", [one])
    found: list[str] = []
    for part in parts:
        kinds = part["type"] if isinstance(part.get("type"), list) else [part.get("type")]
        if "enum" in part:
            found += map(written, part["enum"])
        elif "const" in part:
            found.append(written(part["const"]))
        elif set(kinds) <= {"boolean", "null"}:
            found += [text for kind in kinds for text in {"boolean": ("true", "false"), "null": ("null",)}[kind]]
        else:
            return ()
    return tuple(found)


def _values(one: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    if choices := _choices(one):
        return ", ".join(choices) if set(choices) - {"true", "false", "null"} else " or ".join(choices)
    texts = [text for part in one.get("anyOf", [one]) for text in _phrases(part, shapes)]
    return ", or ".join(dict.fromkeys(texts))


def _phrases(part: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[str]:
    """Yield what one part of a type admits, each of its kinds."""
    if "$ref" in part:
        names = shapes[part["$ref"].rpartition("/")[2]]["properties"]
        yield f"mapping with {', '.join(names)}"
        return
    kinds = part.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind == "null":
            yield "null"
        elif kind == "array" and "$ref" in part.get("items", {}):
            yield next(_phrases(part["items"], shapes)).replace("mapping", "list of mappings", 1)
        elif kind in ("integer", "number"):
            bounds = [text.format(_bound(part[name])) for name, text in _BOUNDS.items() if part.get(name, MOST) != MOST]
            yield ", ".join([_TYPES[kind], *bounds])
        else:
            yield _TYPES[kind]


def _bound(value: float) -> str:
    """Return a bound as text; beyond all other numbers are only powers of two."""
    large = isinstance(value, int) and value > MOST
    return f"2**{int(value).bit_length() - 1}" if large else f"{value:g}"
