"""Colour on a terminal."""

from __future__ import annotations

import os


def coloured(stream: object) -> bool:
    """Return True if `stream` is a terminal that shows colours, and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and bool(getattr(stream, "isatty", lambda: False)())


def paint(text: str, code: str, stream: object) -> str:
    """Return `text` with the codes of a colour if `stream` shows colours."""
    return f"\033[{code}m{text}\033[0m" if coloured(stream) else text
