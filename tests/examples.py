"""The examples of CONTRIBUTING.md, for the tests that execute them."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LINES = 60  # of an example


def example(title: str) -> str:
    """Return the text of the example below a heading; it must be short."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    (found,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^###? )", text, re.MULTILINE | re.DOTALL)
    assert len(found.splitlines()) < MAX_LINES, f"{title}: {len(found.splitlines())} lines"
    return str(found)
