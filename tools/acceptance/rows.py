"""Rows of a part's table: figures, their bounds, and verdicts.

A part appends each row to a file at once, so that what it measured before it hangs or dies is not lost.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda"]

PASS, FAIL, FIGURE = "pass", "fail", ""
NOT_APPLICABLE = "not applicable on a CPU"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One line of a table. A figure without a bound has no verdict."""

    what: str
    figure: str
    bound: str = ""
    verdict: str = FIGURE


class Recorder:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, file: Path, platform: Platform) -> None:
        self._file = file
        self._platform = platform

    def figure(self, what: str, figure: str) -> None:
        """Record a figure that is not judged."""
        self._append(Row(what, figure))

    def check(self, what: str, figure: str, bound: str, good: bool, *, gpu_only: bool = False) -> None:
        """Record a figure and whether it keeps its bound; with `gpu_only` it is not judged on a CPU."""
        if gpu_only and self._platform == "cpu":
            self._append(Row(what, figure, bound, NOT_APPLICABLE))
        else:
            self._append(Row(what, figure, bound, PASS if good else FAIL))

    def at_most(self, what: str, value: float, bound: float, unit: str = "", *, gpu_only: bool = False) -> None:
        """Record a value that must not be above `bound`; NaN counts as above it."""
        self.check(what, f"{value:.3g}{unit}", f"at most {bound:g}{unit}", value <= bound, gpu_only=gpu_only)

    def no_meaning(self, what: str) -> None:
        """Record what cannot be shown on a CPU."""
        self._append(Row(what, "", "", NOT_APPLICABLE))

    def skip(self, what: str, why: str) -> None:
        """Record what was not measured, and why."""
        self._append(Row(what, why, "", SKIPPED))

    def _append(self, row: Row) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.what}: {row.figure} {row.bound and f'({row.bound})'} {row.verdict}".rstrip(), flush=True)


def read(file: Path) -> list[Row]:
    """Return the rows of a file; a last line that is not complete yet is left out."""
    if not file.exists():
        return []
    whole = file.read_text("utf-8").rpartition("\n")[0]
    return [Row(**json.loads(line)) for line in whole.splitlines()]


def verdict(rows: list[Row]) -> str:
    """Return the verdict on a part that ended well: fail if one row fails, pass if one passes."""
    found = {row.verdict for row in rows}
    return next((one for one in (FAIL, PASS, NOT_APPLICABLE, SKIPPED) if one in found), PASS)
