"""The rows of a source that are used: columns renamed, fields added, rows filtered by their fields and lengths.

Conditions are data: nothing that a config says is evaluated. No numpy, for commands that answer at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from gspo_hpc.config.schema import Data, Rows
from gspo_hpc.system.text import near_miss

FIELD = "data_source"  # of a row: the name of its source, as in the data of other trainers

_AS_TEXT = {True: "true", False: "false", None: ""}  # in CSV

T = TypeVar("T")


class Selection:
    """The selection of one source: rows go in one by one, and those that are used come out with their new fields.

    It counts the rows that conditions leave out, and notes the fields that rows have.
    """

    def __init__(self, source: Rows) -> None:
        self._source = source
        self._names: dict[str, None] = {}  # fields of any row, before renaming
        self._fields: dict[str, None] = {}  # and after it
        self.seen = self.left_out = 0

    def note(self, names: Iterable[str]) -> None:
        """Note columns that files have, be they read or not."""
        self._names |= dict.fromkeys(names)

    def of(self, raw: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row as it is used; None if it is left out. Raises ValueError for two fields of one name."""
        self.seen += 1
        self._names |= dict.fromkeys(raw)
        row = self.renamed(raw)
        self._fields |= dict.fromkeys(row)
        if all(name in row and fits(row[name], wanted) for name, wanted in self._source.filter.items()):
            return row
        self.left_out += 1
        return None

    def renamed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with its new names, with constants and the name of its source."""
        row: dict[str, Any] = {}
        for old, value in raw.items():
            new = self._source.columns.get(old, old)
            if new is None:
                continue
            if new in row or new in self._source.constants:
                raise ValueError(f"two fields would be called {new!r}: rename or leave out one of them (columns)")
            row[new] = value
        if row.get(FIELD, self._source.name) != self._source.name:
            raise ValueError(
                f"it has a field {FIELD!r}, which is to hold the name of the source or set: rename it, as with "
                f"columns: {{{FIELD}: {FIELD}_of_row}}"
            )
        return row | self._source.constants | {FIELD: self._source.name}

    def mistakes(self) -> list[str]:
        """Return which columns and fields of conditions no row had, once all rows were seen."""
        if not self.seen:
            return []
        found = [
            f"{what} {name!r}: no row has it{near_miss(name, [*names], known=True)}"
            for what, wanted, names in (
                ("columns", self._source.columns, self._names),
                ("filter", self._source.filter, self._fields),
            )
            for name in wanted
            if name not in names
        ]
        return found


def fits(value: Any, wanted: Any) -> bool:
    """Return whether a value fits a condition: it is equal, one of a list, or within {min, max}.

    Text that is a number, as all values of CSV are text, counts as that number beside a number.
    """
    if isinstance(wanted, Mapping):
        found = number(value)
        low, high = wanted.get("min", float("-inf")), wanted.get("max", float("inf"))
        return found is not None and low <= found <= high
    return any(_equal(value, one) for one in (wanted if isinstance(wanted, list) else [wanted]))


def drawn(rows: list[T], limit: int | None, seed: int, name: str) -> list[T]:
    """Return `limit` of the rows, in their order: a function of seed, name of the source and number of rows.

    Raises ValueError if there are fewer.
    """
    if limit is None:
        return rows
    if limit > len(rows):
        raise ValueError(too_few(limit, len(rows)))
    keys = [hashlib.sha256(f"{seed}:{name}:{place}".encode()).digest() for place in range(len(rows))]
    chosen = sorted(range(len(rows)), key=keys.__getitem__)[:limit]
    return [rows[place] for place in sorted(chosen)]


def too_few(limit: int, rows: int) -> str:
    """Return why a source cannot have so many of its rows."""
    return f"#{limit} asks for more rows than are left, {rows}: give #{rows}, or none"


def without_repeats(texts: Iterable[str], known: set[bytes]) -> list[bool]:
    """Return for each text whether it is the first of its kind; `known` gets those that are, as hashes."""
    found = list[bool]()
    for text in texts:
        mark = hashlib.sha256(" ".join(text.split()).encode()).digest()
        found.append(mark not in known)
        known.add(mark)
    return found


def find_source(fields: Mapping[str, Any], data: Data) -> Rows | None:
    """Return the source or evaluation set of a prompt by its fields; None for prompts of data.train and data.eval."""
    name = fields.get(FIELD) if data.named else None
    return next((one for one in data.named if one.name == name), None)


def dropped(source: Rows | None) -> Collection[str]:
    """Return the columns that a source leaves out."""
    return [] if source is None else [name for name, new in source.columns.items() if new is None]


def _equal(value: Any, wanted: Any) -> bool:
    if wanted is None or isinstance(wanted, bool):
        return value is wanted or (isinstance(value, str) and value.lower() == _AS_TEXT[wanted])
    if isinstance(wanted, int | float):
        return number(value) == wanted
    return bool(value == wanted)


def number(value: Any) -> float | int | None:
    """Return a number, also one that is written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None
