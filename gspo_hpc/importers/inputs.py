"""Read files, YAML text and lists of command-line options."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.config import yaml_text
from gspo_hpc.data.files.formats import DATA_FILES
from gspo_hpc.importers.scripts.scope import is_unset

NULLS = ("null", "None", "~")  # texts that are null in a YAML or an override


def read_text(path: Path | None, wide: bool = False) -> str:
    """Return the text of a file or of standard input. Raises ValueError if it cannot be read as text.

    `wide`: it may be UTF-16, which is what PowerShell writes behind a >.
    """
    try:
        marked = wide and path is not None and path.read_bytes()[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if marked else "utf-8"
        if path is None:
            text = sys.stdin.read()
        else:
            with path.open(encoding=encoding, newline="") as file:
                text = re.sub(r"(?<!\\)\r\n?", "\n", file.read())  # behind a backslash a shell sees it
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

    Dashes in names become underscores; several values of one name become a list. A name stands where it was given last.
    """
    values: dict[str, Any] = {}
    before: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values.pop(name, None)  # the order is that in which they count
            values[name] = value if equals else True
        elif not name:
            before.append(word)
        else:
            held = values[name]
            values[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    return values, before


def completed(values: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options by their whole names, and those that were given by the beginning of one, with the whole name.

    argparse takes a beginning that one option alone has. HfArgumentParser has each name with _ and with -, so that a
    beginning without either of them is that of two where the rest has one.
    """
    found: dict[str, Any] = {}
    taken: dict[str, str] = {}
    for name, value in values.items():
        longer = [] if name in known or not name.isidentifier() else [one for one in known if one.startswith(name)]
        whole = longer[0] if len(longer) == 1 and ("_" in name or "_" not in longer[0]) else name
        if whole != name:
            taken[name] = whole
        found.pop(whole, None)  # the order is that in which they count
        found[whole] = value
    return found, taken


def opposites(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options ``--no_NAME`` that switch off a known NAME, with the value of NAME.

    HfArgumentParser has both names for a switch that is on by default, and the later of the two counts. `values`: in
    the order given. Where ``--no_NAME`` may be given, its text is the value, which is not known.
    """
    places = {name: at for at, name in enumerate(values)}
    found: dict[str, Any] = {}
    for off, given in values.items():
        on = off.removeprefix("no_")
        if off not in known and on in known and (given is True or (is_unset(given))):
            later = places.get(on, -1) > places[off]
            found[off] = values[on] if later else (False if given is True else given)
    return found


def is_null(value: Any) -> bool:
    """Tell whether a value is null, or a text without anything in it."""
    return value is None or (isinstance(value, str) and (not value.strip() or value.strip() in NULLS))


def yaml_value(text: str) -> Any:
    """Return what a text means as YAML, None if it is none."""
    try:
        return yaml_text.read(text)
    except ValueError:
        return None


def is_data_file(name: str) -> bool:
    """Return whether data of this name are a file that can be read here, or a variable that may name one."""
    return name.split("#")[0].endswith(DATA_FILES) or re.fullmatch(r"\$\{?\w+\}?", name) is not None
