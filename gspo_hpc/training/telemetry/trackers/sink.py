"""Interface of a tracker, and helpers that trackers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gspo_hpc.system.text import first_line

Samples = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """A tracker. Any method may raise anything. `place` is where people find what it logs."""

    place: str

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """Log the numbers of one step, and the samples shown with it."""

    def close(self, samples: Samples, exit_code: int) -> None:
        """Finish; `samples` belong to no logged step."""


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {first_line(str(error))}"[:300]
