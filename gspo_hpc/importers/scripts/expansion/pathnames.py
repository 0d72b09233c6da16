"""Tell words that a shell takes for patterns of file names: how many files there are, only the machine knows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gspo_hpc.importers.scripts.expansion.splitting import Open, Piece
from gspo_hpc.importers.scripts.scope import is_unset

# A list in brackets alone, as verl's arguments have them, is a pattern that hardly ever has a file.
_PATTERN = re.compile(r"(?![^*?]*=)(?!-)(?:.*[*?]|.*/.*\[[^\]]+\]|.*\[[^\]]+\].*/)")


def found(words: list[str], pieces: Iterable[Piece]) -> list[str]:
    """Return the words with each that is such a pattern as any number of words, which a command would tell."""
    if not any(not piece.quoted and re.search(r"[*?\[]", piece.text) for piece in pieces):
        return words
    return [Open(f"$(echo {word})") if _PATTERN.match(word) and not is_unset(word) else word for word in words]
