"""Configurations of well-known models that ship with the package: a run is planned before its model is there.

configs/NAME.json holds what architecture.parse reads of the config.json of a model on the Hub.
A base model and its chat model have one file, the chat model's: they differ in the longest sequence at most. Nothing
but planning uses these: a run reads the folder of its own model.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from gspo_hpc.config import paths
from gspo_hpc.system import text

_FOLDER = paths.PACKAGE / "models" / "configs"
_VARIANT = re.compile(r"(-instruct|-base|-v0\.1)+$")  # Mixtral-8x7B-Instruct-v0.1


@cache
def names() -> tuple[str, ...]:
    """The models that are known, such as Qwen3-8B."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _FOLDER.glob("*.json")))


def find(path: str) -> str | None:
    """Return the known model that the last part of a path or of a Hub name names.

    Case does not count, nor whether it is the base model or the chat model.
    """
    wanted = _plain(path)
    return next((name for name in names() if name.lower() == wanted), None)


def nearest(path: str) -> str | None:
    """The known model whose name is most like the last part of a path; None: none is like it."""
    known = {name.lower(): name for name in names()}
    found = text.nearest(_plain(path), known, cutoff=0.75)
    return known[found] if found else None


@cache
def content(name: str) -> dict[str, Any]:
    """The shipped config.json of a known model; not to be changed."""
    raw: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
    return raw


def _plain(path: str) -> str:
    return _VARIANT.sub("", Path(path).name.lower()).removeprefix("meta-")  # meta-llama's older names
