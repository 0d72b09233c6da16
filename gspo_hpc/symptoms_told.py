"""What attempts of a run told of their end: a text that is looked for, and how it is quoted.

Floor 6. For symptoms of errors and of ends.
"""

from __future__ import annotations

import re

from gspo_hpc.symptoms import AttemptEvidence, Evidence, Severity, Told


def blamed(run: Evidence, pattern: re.Pattern[str], *, lines: bool = False) -> tuple[AttemptEvidence, Told] | None:
    """The newest attempt that ended badly with such a text as its cause: what was told of its end or the first error
    of its ranks; where neither says anything of use, or with `lines`, any line of its logs."""
    for attempt in reversed(run.attempts):
        if not attempt.failed:
            continue
        main = [] if attempt.error is None else [attempt.error]
        if attempt.detail:
            main.append(Told(f"attempts/{attempt.number:04d}/attempt.json", attempt.detail))
        for told in main:
            found = [line for line in told.text.splitlines() if pattern.search(line)]
            if found:
                return attempt, Told(told.where, found[-1].strip())
        if lines or attempt.error is None:
            for told in attempt.said:
                if pattern.search(told.text):
                    return attempt, told
    return None


def weight(run: Evidence, attempt: AttemptEvidence) -> Severity:
    """What ended the last attempt is a problem; what the run got over is not."""
    return "problem" if attempt.number == run.attempts[-1].number else "warning"


def short(told: Told) -> str:
    """A text and where it stands, on a line."""
    return f"{one_line(told.text)} [{told.where}]"


def one_line(text: str) -> str:
    """The gist of a text, on a line."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
