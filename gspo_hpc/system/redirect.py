"""The output of this process and its children, turned into a log; a person still gets what is meant for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def to_log(path: Path) -> tuple[TextIO, TextIO]:
    """Append from now on what libraries and children write to a log; return what were standard output and error."""
    output, error = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return output, error
