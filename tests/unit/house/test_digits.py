"""Texts are asked with str.isdecimal before int reads them (milliseconds).

Catches `isdigit` and `isnumeric`, which are true of superscripts and fractions that int refuses: a script with "²"
ended a command with a traceback.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]


@pytest.mark.parametrize("folder", ["gspo_hpc", "tools"])
def test_no_text_that_int_refuses_is_taken_for_a_number(folder: str) -> None:
    wrong = re.compile(r"\.is(?:digit|numeric)\(")
    assert [str(path) for path in (PROJECT / folder).rglob("*.py") if wrong.search(path.read_text("utf-8"))] == []
