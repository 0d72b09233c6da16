"""Tell from their files whether two models have one tokenizer, so that a token has the same meaning in both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.system.text import parse_json, shortened

# In the order in which they are looked for: of the first that one folder has, the other must have an equal one.
_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("spiece.model",), ("tekken.json",))


def difference(own: Path, other: Path) -> str | None:
    """Return in a clause how the tokenizer in the folder `other` differs from that in `own`; None if it does not.

    What counts is which text a token stands for: the vocabulary, the rules that merge its parts, and added tokens, the
    special ones among them. Chat templates, and which special token ends an answer, may differ.
    """
    for names in _FILES:
        if not any((folder / name).is_file() for folder in (own, other) for name in names):
            continue
        for name in names:
            if lacking := [folder for folder in (own, other) if not (folder / name).is_file()]:
                return f"{lacking[0]} has no {name}, so they cannot be compared"
            mine, theirs = ((folder / name).read_bytes() for folder in (own, other))
            if mine == theirs:
                continue
            if name != "tokenizer.json":
                return f"{name} differs"
            if (found := _of_json(_parsed(mine), _parsed(theirs))) is not None:
                return found
        return None
    return "neither folder has the files of one"


def _of_json(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return how two files tokenizer.json differ in what a token stands for."""
    mine, theirs = _model(own), _model(other)
    if (kind := mine.get("type")) != (another := theirs.get("type")):
        return f"it is of type {another}, not {kind}"
    if (found := _of_tokens(_vocabulary(mine), _vocabulary(theirs), "token")) is not None:
        return found
    if (found := _of_tokens(_added(own), _added(other), "added token")) is not None:
        return found
    return "its merges differ" if _merges(mine) != _merges(theirs) else None


def _of_tokens(own: Mapping[str, int], other: Mapping[str, int], what: str) -> str | None:
    """Return the first token that does not have the same number in both, and how many there are."""
    if own == other:
        return None
    differing = sorted((own.get(text, other.get(text, 0)), text) for text, _ in own.items() ^ other.items())
    (_, text), count = differing[0], len({one for _, one in differing})
    mine, theirs = (f"{one[text]}" if text in one else "none" for one in (own, other))
    more = f", and {count - 1:,} more differ" if count > 1 else ""
    return f"{what} {shortened(json.dumps(text, ensure_ascii=False), 40)} has the number {theirs}, not {mine}{more}"


def _parsed(content: bytes) -> Mapping[str, Any]:
    """Return the object in a tokenizer.json, which has been found to be one before."""
    found = parse_json(content, finite=False)
    return found if isinstance(found, Mapping) else {}


def _model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    found = content.get("model")
    return found if isinstance(found, Mapping) else {}


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """Return tokens with their numbers. Unigram models have a list of pairs, whose places are the numbers."""
    found = model.get("vocab")
    if isinstance(found, Mapping):
        return dict(found)
    return {str(pair[0]): number for number, pair in enumerate(found or ())}


def _added(content: Mapping[str, Any]) -> dict[str, int]:
    return {str(one["content"]): int(one["id"]) for one in content.get("added_tokens") or ()}


def _merges(model: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the merges as pairs: files of earlier versions have texts with a space between two parts."""
    return [tuple(one.split(" ", 1) if isinstance(one, str) else one) for one in model.get("merges") or ()]
