"""Keep the files that a shell script writes with here-documents, so that what it starts with them can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gspo_hpc.importers.scripts.parse import parse
from gspo_hpc.importers.scripts.places import plain_path
from gspo_hpc.importers.scripts.scope import Scope, is_unset
from gspo_hpc.importers.scripts.words import text_of

# A here-document as parse() leaves it in the script, a word: whether $NAME in it is replaced, and its text.
_MARK = re.compile(r"heredoc_([01])_([0-9a-f]*)")


class Document(NamedTuple):
    """A here-document as it stands in the script."""

    text: str
    replaced: bool  # $NAME and the like in it are replaced


def taken_out(words: Sequence[str]) -> tuple[list[str], Document | None]:
    """Return the words of a command without its here-document, and that, None if there is none."""
    found: Document | None = None
    for word in words:
        if match := _MARK.fullmatch(word):
            found = Document(bytes.fromhex(match[2]).decode("utf-8", "surrogatepass"), match[1] == "1")
    return [word for word in words if not _MARK.fullmatch(word)], found


def text_with_values(document: Document, scope: Scope) -> str | None:
    """Return the text of a here-document as the shell hands it on, None for one that cannot be followed."""
    if not document.replaced:
        return document.text
    quoted = document.text.replace('"', '\\"')
    try:
        given = parse(f'TEXT="{quoted}"\n').root_node.named_children[0]
        return text_of(given.named_children[-1], scope)
    except ValueError:
        return None


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
    if len(found) != 1 or not found[0][0] or is_unset(path := plain_path(found[0][0])):
        return None
    return path, found[0][1]
