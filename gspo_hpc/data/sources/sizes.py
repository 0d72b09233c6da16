"""The number of prompts that a config trains on, by source, as far as a look at its files tells. No numpy."""

from __future__ import annotations

import math
from collections import Counter

from gspo_hpc.config.schema import Data
from gspo_hpc.data import counting
from gspo_hpc.data.rows import load_parts
from gspo_hpc.data.sources import parts, selection

_KEPT = 16  # counts that are kept: a plan and its fixes ask again and again
_counted: dict[object, dict[str, int] | None] = {}


def sizes(data: Data, seed: int, most_bytes: float = math.inf) -> dict[str, int] | None:
    """Return the prompts of each source, by its name, or of data.train under ""; None if one cannot be counted.

    Prompts that are too long as tokens count: only a tokenizer tells. Files of text of more than `most_bytes` are not
    read, nor is any file of more where its rows are looked at one by one, for a filter or repeated prompts.
    """
    given = parts.training(data)
    if not given or not all(counting.is_there(one.path) for one in given):
        return None
    files = [file for one in given for file in counting.files(one.path) if file.exists()]
    state = tuple((str(file), (told := file.stat()).st_size, told.st_mtime_ns) for file in files)
    key = (repr(data), seed, most_bytes, state)
    if key not in _counted:
        if len(_counted) > _KEPT:
            _counted.clear()
        _counted[key] = _count(given, data, seed, most_bytes)
    return _counted[key]


def _count(given: list[parts.Part], data: Data, seed: int, most_bytes: float) -> dict[str, int] | None:
    looked_at = data.deduplicate or any(
        one.source is not None and (one.source.filter or one.source.characters is not None) for one in given
    )
    if not looked_at:
        found = {_name(one): counting.count_rows(one.path, most_bytes) for one in given}
        counts = {name: count for name, count in found.items() if count is not None}
        limits = {_name(one): one.limit for one in given if one.limit is not None}
        return (
            {name: min(count, limits.get(name, count)) for name, count in counts.items()} if counts == found else None
        )
    if any(sum(file.stat().st_size for file in counting.files(one.path)) > most_bytes for one in given):
        return None
    try:
        rows = load_parts(given, data, seed)
    except (OSError, ValueError, ModuleNotFoundError):  # the check of the data says so
        return None
    if not data.sources:
        return {"": len(rows)}
    named = Counter(row.fields[selection.FIELD] for row in rows)
    return {_name(one): named[_name(one)] for one in given}


def _name(part: parts.Part) -> str:
    return "" if part.source is None else part.source.name
