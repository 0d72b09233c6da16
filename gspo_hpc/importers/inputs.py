"""Read YAML text and lists of command-line options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gspo_hpc.config import yaml_text


def read_yaml(text: str) -> dict[str, Any] | None:
    """Return the mapping that a YAML text holds, or None if it holds something else.

    Raises ValueError with the line of a mistake.
    """
    raw = yaml_text.read(text)
    return raw if isinstance(raw, dict) else None


def flatten(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of nested mappings; an empty mapping is a value."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def options(words: tuple[str, ...] | list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of ``--name value ...``, ``--name=value`` and ``--name`` (True), and the words before them.

    Dashes in names become underscores; several values of one name become a list.
    """
    values: dict[str, Any] = {}
    before: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else True
        elif not name:
            before.append(word)
        else:
            held = values[name]
            values[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    return values, before
