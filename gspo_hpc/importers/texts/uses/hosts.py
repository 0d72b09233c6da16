"""Find the command of a script that starts a generation server."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts.commands import TOOLS

_REMOTE = ("ssh", "tmux", "screen")  # may be given a whole command as one word


def server(commands: list[Command], program: str, verb: str, module: str) -> Command | None:
    """Return the command that starts a generation server, with the server's own arguments as its words.

    It is ``program verb ...`` or a Python file or module `module` (a pattern), behind any launcher.
    """
    for command in commands:
        words = command.words
        if not words or os.path.basename(words[0]) in TOOLS:
            continue
        if os.path.basename(words[0]) in _REMOTE:
            words = tuple(part for word in words for part in word.split())
        for number, word in enumerate(words):
            if os.path.basename(word) == program and words[number + 1 : number + 2] == (verb,):
                return replace(command, words=words[number + 2 :])
            if re.search(rf"(^|[./]){module}(\.py)?$", word):
                return replace(command, words=words[number + 1 :])
    return None
