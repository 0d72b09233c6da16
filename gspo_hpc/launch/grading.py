"""Rows of the data that lack a field which reward functions need: found by trying a few of those that differ.

The first row of each part of the data is tried anyway. A row that has the fields of that one is taken to be like it;
of the others enough are tried that every field which is missing somewhere is missing in one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.config.schema import Config

if TYPE_CHECKING:
    from gspo_hpc.data.rows import Row
    from gspo_hpc.data.sources.parts import Part


class Lacking(NamedTuple):
    """A row that lacks fields, and how many rows lack these, itself included."""

    row: Row
    missing: frozenset[str]
    alike: int


def known_fields(row: Row) -> frozenset[str]:
    """Return the fields of a row that have a value: null, as a column of a table has it, is none."""
    return frozenset(name for name, value in row.fields.items() if value is not None)


def lacking(rows: Sequence[Row], wanted: Collection[str]) -> list[Lacking]:
    """Return rows that lack some of the wanted fields, as few as show every field that any row lacks."""
    all_wanted = frozenset(wanted)
    kinds: dict[frozenset[str], Row] = {}
    counts: dict[frozenset[str], int] = {}
    for row in rows:
        if missing := all_wanted - known_fields(row):
            kinds.setdefault(missing, row)
            counts[missing] = counts.get(missing, 0) + 1
    found, seen = list[Lacking](), set[str]()
    # Those that lack one field first: which of several a function needs would not be known.
    for missing in sorted(kinds, key=len):
        if not missing <= seen:
            seen |= missing
            found.append(Lacking(kinds[missing], missing, sum(n for other, n in counts.items() if missing <= other)))
    return found


class Looked(NamedTuple):
    """The first row of a part of the data, and those that lack what other rows have."""

    part: Part
    first: Row
    odd: list[Lacking]


def look(rows: Iterable[tuple[Part, Sequence[Row]]]) -> Iterator[Looked]:
    """Yield what is to be tried of each part of the data, that which is trained on first; its rows are not kept.

    Rows to evaluate on should have what the first row of the same source has that is trained on.
    """
    usual: dict[str | None, frozenset[str]] = {}
    for part, own in rows:
        name = None if part.source is None else part.source.name
        yield Looked(part, own[0], lacking(own, usual.setdefault(name, known_fields(own[0]))))


def refused(config: Config, looked: Looked) -> Iterator[str]:
    """Yield what reward functions say of rows that lack a field, with the place of the row.

    They are called, but for those that ask a service: each call would be one more request.
    """
    part, _, odd = looked
    if not odd or not config.reward.functions:
        return
    from gspo_hpc.rewards import trial  # only here: processes come with it
    from gspo_hpc.rewards.catalogue import ASK_ELSEWHERE

    every = {name: config.reward.functions[number] for name, number in terms(config, part).items()}
    functions = {name: term for name, term in every.items() if term.function not in ASK_ELSEWHERE}
    tried = [(one.row.text, one.row.fields) for one in odd]
    memory = config.reward.memory_gb
    outcomes = trial.run_rows(list(functions.values()), tried, memory_gb=memory, sandbox=config.sandbox)
    for one, found in zip(odd, outcomes, strict=True):
        for function, outcome in zip(functions, found, strict=True):
            if outcome.failure is not None and outcome.certain:
                others = one.alike - 1
                also = f"; {others:,} more row{'s lack' if others > 1 else ' lacks'} it, too" if others else ""
                missing = ", ".join(map(repr, sorted(one.missing)))
                yield f"{one.row.where}: the row lacks {missing}, and {function} {outcome.failure}{also}"


def terms(config: Config, part: Part) -> dict[str, int]:
    """Return the positions of the reward functions that have to grade the rows of a part, by name.

    Of rows to evaluate on it is the one that decides: they may lack what only training asks for.
    """
    from gspo_hpc.evaluation.deciding import decider
    from gspo_hpc.rewards import registry

    names, decides = registry.part_names(config.reward), decider(config, part.source)
    weights = registry.source_weights(config.reward, part.source)
    return {names[number]: number for number in weights if part.trains or names[number] == decides}
