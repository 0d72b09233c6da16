"""Rows of the data that lack a field which reward functions need: found by trying a few of those that differ.

The first row of each part of the data is tried anyway. A row that has the fields of that one is taken to be like it;
of the others enough are tried that every field which is missing somewhere is missing in one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.data.rows import Lacking, Row, known_fields, lacking
from gspo_hpc.data.sources.parts import Part
from gspo_hpc.rewards import registry
from gspo_hpc.rewards.catalogue import ASK_ELSEWHERE


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

    terms = registry.grading_terms(config, part.source, trains=part.trains)
    every = {name: config.reward.functions[number] for name, number in terms.items()}
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
