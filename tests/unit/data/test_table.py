"""The table of groups: what all ranks know, from what each of them holds.

Catches a table that depends on which rank holds what, a value that changes on the way, and a wrong CRC of all tokens.
"""

from __future__ import annotations

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import EXCLUDED, TRUNCATED, UNGRADED, GroupTable, ShardedGroups, concatenate

NUMBERS = st.floats(width=64) | st.sampled_from([0.1, -0.0, float("inf")])


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)), np.int32)
    flags = st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens))
    environment = draw(st.none() | flags.map(lambda made: np.array(made, np.uint8)))
    sampled = len(tokens) if environment is None else int((environment == 0).sum())
    return Completion(
        tokens,
        np.zeros(sampled, np.float32),
        "",
        draw(st.sampled_from(["stop", "length"])),
        0,
        reward=draw(NUMBERS),
        reward_parts=draw(st.dictionaries(st.sampled_from("abc"), NUMBERS)),
        failure=draw(st.sampled_from([None, "it raised"])),
        excluded=draw(st.booleans()),
        advantage=draw(NUMBERS),
        num_cached_tokens=draw(st.integers(0, 2**20)),
        environment=environment,
    )


def groups() -> st.SearchStrategy[list[Group]]:
    one = st.builds(
        lambda slot, made: Group(slot, Prompt(0, np.arange(slot + 1, dtype=np.int32), "", {}), tuple(made)),
        st.integers(0, 50),
        st.lists(completions(), min_size=1, max_size=4),
    )
    return st.lists(one, max_size=6, unique_by=lambda group: group.slot)


def same(one: object, other: object) -> bool:
    return np.float64(one).tobytes() == np.float64(other).tobytes()  # type: ignore[arg-type]


def turns(completion: Completion) -> int:
    """The pieces of the model's tokens, by going through them."""
    if completion.environment is None:
        return 1
    return sum(kind == 0 for kind, _ in itertools.groupby(completion.environment.tolist()))


@settings(deadline=None, max_examples=25)
@given(groups(), st.integers(1, 4))
def test_the_table_is_that_of_all_groups_whoever_holds_them(made: list[Group], ranks: int) -> None:
    parts = [GroupTable.of([g for g in made if g.slot % ranks == rank], rank) for rank in range(ranks)]
    table = GroupTable.from_bytes(concatenate([GroupTable.from_bytes(part.to_bytes()) for part in parts]).to_bytes())
    every = sorted(
        ((g, i, c) for g in made for i, c in enumerate(g.completions)), key=lambda entry: (entry[0].slot, entry[1])
    )
    assert len(table) == len(every) and table.slots == sorted(g.slot for g in made)
    assert table.holders == {g.slot: g.slot % ranks for g in made}
    for place, (group, index, completion) in enumerate(every):
        row = table.rows[place]
        assert (row["slot"], row["index"]) == (group.slot, index)
        assert (row["prompt_len"], row["response_len"]) == (len(group.prompt.tokens), len(completion.tokens))
        assert row["sampled_len"] == len(completion.logprobs) and row["turns"] == turns(completion)
        assert same(row["reward"], completion.reward) and same(row["advantage"], completion.advantage)
        assert row["num_cached_tokens"] == completion.num_cached_tokens
        flags = (completion.excluded, completion.failure is not None, completion.finish_reason == "length")
        assert tuple(bool(table.flagged(flag)[place]) for flag in (EXCLUDED, UNGRADED, TRUNCATED)) == flags
        there = {name for column, name in enumerate(table.names) if table.graded[place, column]}
        assert there == set(completion.reward_parts)
        for column, name in enumerate(table.names):
            if name in there:
                assert same(table.reward_parts[place, column], completion.reward_parts[name])
    assert table.tokens_crc32() == zlib.crc32(b"".join(c.tokens.tobytes() for _, _, c in every))
    assert table.samples().tolist() == [
        [g.slot, i, len(g.prompt.tokens), len(c.tokens)] for g, i, c in every if len(c.tokens)
    ]
    keys = np.array([(g.slot, i) for g, i, _ in every], np.int64).reshape(-1, 2)
    backwards = table.places(keys[::-1])
    assert backwards.tolist() == [*range(len(table))][::-1]


def test_groups_are_chosen_by_their_slots() -> None:
    completion = Completion(np.ones(2, np.int32), np.zeros(2, np.float32), "", "stop", 0)
    made = [Group(slot, Prompt(0, np.ones(1, np.int32), "", {}), (completion, completion)) for slot in range(4)]
    groups = ShardedGroups(GroupTable.of(made, 0), {group.slot: group for group in made[1:]})
    chosen = groups.at([0, 2])
    assert chosen.table.slots == [0, 2] and len(chosen.table) == 4 and list(chosen.own) == [2]


def test_an_outcome_of_an_earlier_version_counts_as_none() -> None:
    """A journal may hold outcomes that this version does not know: they end no run."""
    made = [
        Completion(
            np.zeros(1, np.int32),
            np.zeros(1, np.float32),
            "",
            "stop",
            0,
            reward_parts={"code": 0.0},
            outcomes={"code": one},  # type: ignore[dict-item]
        )
        for one in ("right", "banana")
    ]
    table = GroupTable.of([Group(0, Prompt(0, np.zeros(1, np.int32), "", {}), tuple(made))], 0)
    assert table.outcomes.tolist() == [[1], [0]]
