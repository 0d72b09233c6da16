"""Observers of a user's own beside a real run: they see what metrics.jsonl has, and one that fails is told once.

Costs nothing beside the run that other tests compare with (`uninterrupted`), which has these observers: that killed and
resumed runs without them equal it bit for bit (test_resume.py) shows that they change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.run import harness


def test_an_observer_gets_every_record(uninterrupted: Path) -> None:
    seen = [json.loads(line) for line in (uninterrupted / "observed.jsonl").read_text().splitlines()]
    assert seen == harness.metrics(uninterrupted) and len(seen) == harness.STEPS + 1


def test_one_that_fails_is_told_once(uninterrupted: Path) -> None:
    console = " ".join((uninterrupted / "attempts" / "0001" / "console.log").read_text().split())
    assert console.count("observers.py:fail") == 1
    assert "observers.py:fail failed at step 0: SystemExit: cannot take step 0; training goes on" in console
    assert console.count("observers.py:keep") == 0
