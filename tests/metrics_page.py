"""The metrics that docs/metrics.md explains, for tests that compare them with those of the code and of real runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests import pages

PAGE = (pages.PROJECT / "docs" / "metrics.md").read_text("utf-8")


def keys(text: str = PAGE) -> list[str]:
    """Return the keys in the tables of the page, in its order."""
    rows = re.findall(r"(?m)^\| (`[^|]+`) \|", text)
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row)]


def fits(key: str, explained: str) -> bool:
    """Tell if a key is the one of the page; NAME in it stands for anything, PASS for a word, and K for a number."""
    places = {"NAME": ".+", "PASS": "[^/@]+", "K": r"\d+"}
    parts = re.split(r"(NAME|PASS|K(?=$|_))", explained)
    return bool(re.fullmatch("".join(places.get(part, re.escape(part)) for part in parts), key))


def unexplained(found: Iterable[str], text: str = PAGE) -> list[str]:
    """Return the keys that the page does not have."""
    known = keys(text)
    return sorted(key for key in set(found) if not any(fits(key, one) for one in known))
