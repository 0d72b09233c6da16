"""Addresses of notifications. They may hold passwords, so a config only says where each of them stands."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gspo_hpc.config.schema import Notify


class AddressAbsent(ValueError):
    """A variable or a file of an address that is not on this machine."""


def resolve(notify: Notify) -> list[str]:
    """Return the addresses that the settings lead to.

    Raises ValueError if there is none at a place, or if others may read the file.
    """
    return [address for place in notify.urls for address in at(place)]


def at(place: str) -> list[str]:
    """Return the addresses at one place.

    Raises ValueError as :func:`resolve` does; AddressAbsent where there is no such variable or file.
    """
    kind, _, name = place.partition(":")
    if kind == "env":
        if found := os.environ.get(name, "").split():
            return found
        raise AddressAbsent(
            f"notify.urls: {place}: the variable {name} is not set: export it in the shell that starts the run"
        )
    if found := _lines(place, Path(name).expanduser()):
        return found
    raise ValueError(f"notify.urls: {place}: the file has no address: write one a line")


def _lines(place: str, path: Path) -> list[str]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ValueError(f"notify.urls: {place}: others may read the file (mode {mode:o}): chmod 600 {path}")
        lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    except OSError as error:
        kind = AddressAbsent if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"notify.urls: {place}: {error.strerror}") from None
    return [line for line in lines if line and not line.startswith("#")]
