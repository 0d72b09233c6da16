"""Addresses of notifications. They may hold passwords, so a config only says where each of them stands."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gspo_hpc.config.schema import Notify


def resolve(notify: Notify) -> list[str]:
    """Return the addresses that the settings lead to.

    Raises ValueError if there is none at a place, or if others may read the file.
    """
    return [address for place in notify.urls for address in _at(place)]


def _at(place: str) -> list[str]:
    kind, _, name = place.partition(":")
    if kind == "env":
        found = os.environ.get(name, "").split()
        fix = f"the variable {name} is not set: export it in the shell that starts the run"
    else:
        found, fix = _lines(place, Path(name).expanduser()), "the file has no address: write one a line"
    if not found:
        raise ValueError(f"notify.urls: {place}: {fix}")
    return found


def _lines(place: str, path: Path) -> list[str]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ValueError(f"notify.urls: {place}: others may read the file (mode {mode:o}): chmod 600 {path}")
        lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    except OSError as error:
        raise ValueError(f"notify.urls: {place}: {error.strerror}") from None
    return [line for line in lines if line and not line.startswith("#")]
