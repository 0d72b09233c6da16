"""The section about the failure that ended the newest attempt: why, and the end of the log that says so."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from gspo_hpc.launch import status
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import RunData
from gspo_hpc.system.terminal import program
from gspo_hpc.system.text import shortened, tail

_ENDED = {"failed": "failed", "killed": "was killed", "refused": "was refused"}
BAD = tuple(_ENDED)
LINES = 24  # of a log that are shown
LONGEST_LINE = 400  # characters
_TAIL = 64 * 1024  # bytes of a log that are read


@dataclass(frozen=True)
class Failure:
    """The failure that ended the newest attempt. `log` is empty where no rank left any."""

    title: str
    cause: str
    where: str  # the log, below the run directory
    log: str
    more: str  # the command that shows the rest


def failure(run: RunData) -> Failure | None:
    """Return what ended the newest attempt; None if it goes on, is done, or was ended on purpose."""
    if not run.attempts or run.attempts[-1].reason not in BAD:
        return None
    last = run.attempts[-1]
    steps = f" after step {last.steps[1]}" if last.steps and last.steps[1] else " before its first step"
    told = last.reason == "refused" and last.detail  # a mistake of the user's, which no log explains better
    where, text = ("", "") if told else _log(RunDir(run.path), last.number)
    return Failure(
        title=f"Attempt {last.number} {_ENDED[last.reason]}{steps}",
        cause=last.detail or ("nothing of it could say why" if last.reason == "killed" else "no reason is on record"),
        where=where,
        log=text,
        more=f"{program()} logs {shlex.quote(str(run.path))} --attempt {last.number}" if text else "",
    )


def _log(run: RunDir, number: int) -> tuple[str, str]:
    """Return the log that says what went wrong, and its last lines: a traceback, else the end of what was written."""
    try:
        found = status.first_error(run.path, number)
        if found is not None:
            return os.path.relpath(found[0], run.path), _last_lines(found[1])
    except (ValueError, OSError, KeyError):
        pass  # a damaged attempt: its logs may be whole all the same
    attempt = run.attempt(number)
    for path in (attempt.console, *attempt.logs().values()):
        try:
            if text := _last_lines(tail(path, _TAIL)):
                return os.path.relpath(path, run.path), text
        except OSError:
            continue
    return "", ""


def _last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(shortened(line.rstrip(), LONGEST_LINE) for line in lines[-LINES:])
