"""Interface of a tracker, and helpers that trackers share.

A tracker has no memory of its own: :attr:`Tracker.sent` is asked of the place that it writes to. So a record is there
exactly once, whatever was killed between a step and its arrival, and all come again where the place was emptied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo_hpc.system.text import first_line

Samples = Sequence[Mapping[str, Any]]
_ACCOUNT = re.compile(r"://[^/@\s]*@")
AXES = ("step", "time")  # of a record: what trackers with axes of their own do not log as curves


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked. All of its attempts are one run of a tracker, found again by `id`."""

    path: Path
    id: str
    name: str
    config: Mapping[str, Any]  # the settings as nested mappings, without the texts of keys that name a secret


@dataclass(frozen=True)
class Record:
    """A line of metrics.jsonl: its numbers, and the samples that were shown with it."""

    step: int
    time: float  # unix seconds
    values: Mapping[str, float]  # step and time included
    samples: Samples = ()

    @property
    def curves(self) -> dict[str, float]:
        """The numbers without step and time."""
        return {key: value for key, value in self.values.items() if key not in AXES}


@dataclass(frozen=True)
class Sent:
    """The last step that a tracker has. `keys` are those that it has of this step; None stands for all."""

    step: int = -1
    keys: frozenset[str] | None = None


class Tracker(Protocol):
    """An open tracker. Any method may raise anything, and may take any time.

    `place` is where people find what it logs; `sent` is what was there when it was opened.
    """

    place: str
    sent: Sent

    def log(self, records: Sequence[Record]) -> None:
        """Log records, in their order."""

    def close(self, exit_code: int) -> None:
        """Finish, until the next attempt of the run: `exit_code` says how this one ended."""


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def in_one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text, without the user and password of an address."""
    return _ACCOUNT.sub("://", f"{type(error).__name__}: {first_line(str(error))}")[:300]
