"""Search what the attempts of a run reported when they ended, and quote it."""

from __future__ import annotations

import re

from gspo_hpc.diagnose.evidence import AttemptEvidence, Evidence, Excerpt
from gspo_hpc.diagnose.registry import Severity
from gspo_hpc.runs.directory import ATTEMPT_FILE
from gspo_hpc.system.text import shortened


def failure_matching(
    run: Evidence, pattern: re.Pattern[str], *, lines: bool = False
) -> tuple[AttemptEvidence, Excerpt] | None:
    """Return the newest failed attempt whose cause matches `pattern`, and the line that does.

    The cause is the detail in attempt.json or the first error among the ranks. If neither exists, or with `lines`, any
    quoted line of the attempt's logs counts.
    """
    for attempt in reversed(run.attempts):
        if not attempt.failed:
            continue
        main = [] if attempt.error is None else [attempt.error]
        if attempt.detail:
            main.append(Excerpt(f"attempts/{attempt.number:04d}/{ATTEMPT_FILE}", attempt.detail))
        for excerpt in main:
            found = [line for line in excerpt.text.splitlines() if pattern.search(line)]
            if found:
                return attempt, Excerpt(excerpt.where, found[-1].strip())
        if lines or attempt.error is None:
            for excerpt in attempt.excerpts:
                if pattern.search(excerpt.text):
                    return attempt, excerpt
    return None


def severity_of(run: Evidence, attempt: AttemptEvidence) -> Severity:
    """Return "problem" for the last attempt, and "warning" for one after which the run went on."""
    return "problem" if attempt.number == run.attempts[-1].number else "warning"


def quoted(excerpt: Excerpt) -> str:
    """Write an excerpt and its path on one line."""
    return f"{one_line(excerpt.text)} [{excerpt.where}]"


def one_line(text: str) -> str:
    """Join the lines of a text, and shorten it to 300 characters."""
    return shortened(" ".join(text.split()), 300)
