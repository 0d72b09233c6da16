"""Read files, YAML text and lists of command-line options."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.config import yaml_text

NULLS = ("null", "None", "~")  # texts that are null in a YAML or an override


def read_text(path: Path | None) -> str:
    """Return the text of a file or of standard input. Raises ValueError if it cannot be read as text."""
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
        text.encode("utf-8")  # in some locales standard input lets other bytes through, as surrogates
        return text
    except UnicodeError as error:
        raise ValueError(f"{path or '-'}: not UTF-8 text ({getattr(error, 'reason', error)})") from None
    except OSError as error:
        raise ValueError(f"{path or '-'}: cannot be read: {error.strerror}") from None


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


def is_null(value: Any) -> bool:
    """Tell whether a value is null, or a text without anything in it."""
    return value is None or (isinstance(value, str) and (not value.strip() or value.strip() in NULLS))


def yaml_value(text: str) -> Any:
    """Return what a text means as YAML, None if it is none."""
    try:
        return yaml_text.read(text)
    except ValueError:
        return None
