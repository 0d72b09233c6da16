"""Decide which rank failed first, so that the cause is named and not what followed from it.

The launcher knows exit codes and logs, the supervisor what each rank reported and when, and ``gspo-hpc logs --errors``
only logs. All of them ask the same question here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Errors that a rank raises because another rank is gone: such a rank is not the one to blame. The words of networks
# count only in errors that torch.distributed raises: a model, a disk or a hub may time out, too.
AFTERMATH = re.compile(
    r"gloo|nccl|\b(?:tcp|dist|file|hash|prefix)?store(?:error)?\b|torch\.distributed|\bDist(?:Backend|Network)?Error\b"
    r"|^(?:RuntimeError|ConnectionResetError|BrokenPipeError)\b.*"
    r"(?:connection (?:closed|reset|refused|was)|timed out|timeout|broken pipe)",
    re.IGNORECASE,  # of the store that ranks share, but not what cannot be restored, or lies in some datastore
)


@dataclass(frozen=True)
class Failure:
    """A rank that failed, with what is known of it."""

    rank: int
    error: str = ""  # last line of its traceback; empty if it left none
    killed: bool = False  # by a signal, or its connection was lost
    at: float = 0.0  # when it failed, on any one clock; 0 for all if nobody knows


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others most likely follow from.

    An error about another rank's end comes last, whenever it was raised. Otherwise the earliest failure comes first; at
    the same time, or if times are not known, a killed rank comes before one with an error, and that before one without.
    """

    def order(one: Failure) -> tuple[bool, float, int, int]:
        aftermath = not one.killed and AFTERMATH.search(one.error) is not None
        return aftermath, one.at, 0 if one.killed else 1 if one.error else 2, one.rank

    return min(failures, key=order)
