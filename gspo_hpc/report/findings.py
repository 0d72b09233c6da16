"""Findings about what is wrong or slow in a run, as the report shows them: the caller has them from the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShownFinding:
    """One finding of the page."""

    severity: str  # problem, warning or note
    title: str
    cause: str
    evidence: Sequence[str]  # numbers, and lines of logs
    settings: Sequence[str] = ()  # changes that help, as key=value; this run may be resumed with them
    new_run: Sequence[str] = ()  # those that only a new run can have
    look: Sequence[str] = ()  # where to look next
