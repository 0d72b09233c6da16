"""Output of a process: colour on a terminal, a log for what libraries and children write, commands to paste."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def coloured(stream: object) -> bool:
    """Return True if `stream` is a terminal that shows colours, and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and bool(getattr(stream, "isatty", lambda: False)())


def paint(text: str, code: str, stream: object) -> str:
    """Return `text` with the codes of a colour if `stream` shows colours."""
    return f"\033[{code}m{text}\033[0m" if coloured(stream) else text


def program() -> str:
    """Return the words that start this program in a shell: gspo-hpc if PATH has this one, else with its folder."""
    import shlex
    import shutil
    import sys

    own, found = Path(sys.executable).parent / "gspo-hpc", shutil.which("gspo-hpc")
    if found is not None and own.exists() and os.path.samefile(found, own):
        return "gspo-hpc"
    return shlex.quote(str(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m gspo_hpc"


def redirect_to_log(path: Path) -> tuple[TextIO, TextIO]:
    """Append from now on what libraries and children write to a log; return what were standard output and error."""
    from gspo_hpc.system.files import open_log  # not for those who only want colours

    output, error = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    log = open_log(path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return output, error
