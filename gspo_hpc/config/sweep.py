"""The points of a sweep: all combinations of the values that several settings are given."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_hpc.config.schema import run_name

_FORM = "write section.key=value,value,... such as run.seed=1,2,3"
_CLOSES = {"[": "]", "{": "}", "(": ")"}
_FIXED = ("run.name", "run.dir")  # each point gets its own
_LONGEST = 60  # characters of the name of a point


@dataclass(frozen=True)
class Point:
    """One run of a sweep. Its name is that of its folder."""

    name: str
    settings: tuple[str, ...]  # section.key=value


def points(given: Sequence[str]) -> list[Point]:
    """Return the points of ``section.key=value,value,...``, the last setting varying fastest.

    A comma inside brackets or quotes belongs to the value. Raises ValueError for what has another form.
    """
    choices: dict[str, list[str]] = {}
    for text in given:
        key, equals, rest = text.partition("=")
        values = _split(rest)
        if not equals or not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)+", key) or not all(values):
            raise ValueError(f"--array {text}: {_FORM}")
        if key in _FIXED:
            raise ValueError(f"--array {key}: each run of a sweep gets its own; sweep over another setting")
        if key in choices:
            raise ValueError(f"--array {key} is given twice: give all of its values at once")
        if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise ValueError(f"--array {key}: {twice[0]} is given twice")
        choices[key] = values
    combined = itertools.product(*([f"{key}={value}" for value in values] for key, values in choices.items()))
    return [Point(_name(settings, list(choices)), settings) for settings in combined]


def _split(text: str) -> list[str]:
    """Return the parts of a text between the commas that are in no brackets and in no quotes."""
    parts, quote = [""], ""
    open_: list[str] = []
    for letter in text:
        if letter == "," and not open_ and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSES:
            open_.append(_CLOSES[letter])
        elif open_ and letter == open_[-1]:
            open_.pop()
        parts[-1] += letter
    return [part.strip() for part in parts]


def _name(settings: Sequence[str], keys: Sequence[str]) -> str:
    """Return a name such as seed-1_lr-1e-6. It depends on nothing but the settings, so the same point has it again."""
    lasts = [key.rpartition(".")[2] for key in keys]
    words = []
    for setting in settings:
        key, _, value = setting.partition("=")
        last = key.rpartition(".")[2]
        words.append(f"{last if lasts.count(last) == 1 else key}-{value}")
    whole = "_".join(words)
    plain = run_name(whole)
    if plain == whole and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST].rstrip('-._')}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
