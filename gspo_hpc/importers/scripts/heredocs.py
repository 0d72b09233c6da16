"""Keep the files that a shell script writes with here-documents, so that what it starts with them can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gspo_hpc.importers.scripts.parse import Document as Document
from gspo_hpc.importers.scripts.parse import taken_out as taken_out
from gspo_hpc.importers.scripts.places import plain_path
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.words import text_with_values as text_with_values

SHELLS = ("bash", "sh", "dash")


def reads(words: Sequence[str]) -> bool:
    """Tell whether a command takes the text on its input as it is: it hands it on, sets a variable to it, or runs it.

    A launcher may start the shell that runs it.
    """
    names = [word.rpartition("/")[2] for word in words]
    keeps = list(words) in (["cat"], ["cat", "-"]) or names[:1] in (["tee"], ["read"], ["sbatch"])
    return keeps or any(name in SHELLS for name in names)


def _is_open(path: str) -> bool:
    """Tell whether the name of a file is not known, nor one that stands for the same file wherever it is used."""
    return is_unset(re.sub(r"\$\(mktemp\.\.\.[\d.]+\)|\$\$", "", path))


def target(words: Sequence[str], redirects: Sequence[tuple[str, str]]) -> tuple[str, bool] | None:
    """Return the file that a command writes its here-document to, and whether it appends; None if it writes none.

    `redirects`: sign and file of each of its redirections.
    """
    if words[:1] == ["tee"]:
        files = [word for word in words[1:] if not word.startswith("-")]
        found = [(name, "-a" in words[1:]) for name in files]
    elif list(words) in (["cat"], ["cat", "-"]):
        found = [(name, sign == ">>") for sign, name in redirects if sign in (">", ">>", ">|")]
    else:
        return None
    if len(found) != 1 or not found[0][0] or _is_open(path := plain_path(found[0][0])):
        return None
    return path, found[0][1]
