"""Output of a process: colour on a terminal, a log for what libraries and children write, commands to paste."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TextIO

# Our commands, and those of other programs of an environment that we name; not where a path, a shell variable or
# another program already stands before the name.
COMMANDS = (
    *("init", "plan", "suggest", "keys", "convert", "doctor", "schema", "completion"),
    *("try", "train", "submit", "status", "logs", "cancel", "eval", "rescore", "compare"),
    *("serve", "export", "report", "sync", "diagnose"),
)
_OTHERS = "hf(?= download)|tensorboard(?= --logdir)|trackio(?= (?:show|sync))|wandb(?= login)|pip(?= install)"
_COMMAND = re.compile(
    r"(?<![\w./$'-])(?<!-m )(?<!uv )"
    rf"(?P<name>(?:gspo-hpc(?= (?:{'|'.join(COMMANDS)})\b)|{_OTHERS}))(?P<what> [\w-]+(?: RUN\b)?)"
)


def coloured(stream: object) -> bool:
    """Return True if `stream` is a terminal that shows colours, and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and bool(getattr(stream, "isatty", lambda: False)())


def paint(text: str, code: str, stream: object) -> str:
    """Return `text` with the codes of a colour if `stream` shows colours."""
    return f"\033[{code}m{text}\033[0m" if coloured(stream) else text


def program(name: str = "gspo-hpc") -> str:
    """Return the words that start a program of this environment in a shell: its name if PATH has it, else its path.

    Another program than this one is left as it is where the environment has none of that name.
    """
    import shlex  # these only here: most processes print no command
    import shutil
    import sys

    own = Path(sys.executable).parent / name
    if not own.exists():
        return f"{shlex.quote(sys.executable)} -m gspo_hpc" if name == "gspo-hpc" else name
    found = shutil.which(name)
    return name if found is not None and os.path.samefile(found, own) else shlex.quote(str(own))


def pasteable(text: str, run: str | Path | None = None) -> str:
    """Return a text whose commands can be pasted, whether the environment is activated or not.

    `run`: the run directory that RUN stands for in them.
    """

    def written(match: re.Match[str]) -> str:
        what = match["what"]
        if run is not None and what.endswith(" RUN"):
            import shlex

            what = what.removesuffix("RUN") + shlex.quote(str(run))
        return program(match["name"]) + what

    return _COMMAND.sub(written, text)


def redirect_to_log(path: Path) -> tuple[TextIO, TextIO]:
    """Append from now on what libraries and children write to a log; return what were standard output and error."""
    from gspo_hpc.system.files import open_log  # not for those who only want colours

    output, error = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    log = open_log(path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return output, error
