"""Times as Slurm writes them."""

from __future__ import annotations

import re

FORMS = "90, 90:00, 1:30:00, 1-12, 1-12:30 or 1-12:30:00"
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# The same with at most 59 minutes and seconds and 23 hours behind a larger unit, above 0 and below 10**9 minutes.
_HOUR, _SIXTY = "(?:[01]?[0-9]|2[0-3])", "[0-5]?[0-9]"
LIMIT = re.compile(
    rf"(?=.*[1-9])(?:[0-9]{{1,9}}(?::{_SIXTY})?|[0-9]{{1,7}}:{_SIXTY}:{_SIXTY}"
    rf"|[0-9]{{1,5}}-{_HOUR}(?::{_SIXTY}(?::{_SIXTY})?)?)"
)


def parse_minutes(text: str) -> float | None:
    """Parse a time limit (90, 1:30:00, 2-12:00:00) into minutes; None for UNLIMITED and the like."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:  # D-H[:M[:S]]
        return int(days) * 1440 + int(first) * 60 + int(second or 0) + int(third or 0) / 60
    if third is not None:
        return int(first) * 60 + int(second) + int(third) / 60
    return int(first) + int(second or 0) / 60
