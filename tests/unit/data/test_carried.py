"""Groups that a rollout hands on: what is carried, in which order, and what a checkpoint may say of them.

It takes a second. It would catch a group that is lost or carried twice, an older state of a group in the place of a
newer one, and a checkpoint of another's making that has a file read outside the journals.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.data.carried import Carried, Enough, Place, handed_on
from gspo_hpc.data.prompts import Position

places = st.builds(
    Place,
    rollout=st.integers(0, 99),
    fingerprint=st.text("0123456789abcdef", min_size=1),
    file=st.sampled_from(["rank-0000.spare", "rank-0012.unfinished"]),
    offset=st.integers(0, 10**12),
    length=st.integers(1, 10**9),
)
groups = st.builds(
    Carried, prompt=st.integers(0, 9), began=st.integers(0, 9), finished=st.booleans(), place=st.none() | places
)


@given(st.lists(groups, max_size=9))
def test_a_checkpoint_gives_back_what_it_was_given(carried: list[Carried]) -> None:
    position = Position(3, 4, carried=tuple(carried))
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position


@given(st.dictionaries(st.integers(0, 20), groups), st.data())
def test_what_is_not_used_is_carried_in_its_order_with_the_newest_place(
    slots: dict[int, Carried], data: st.DataObject
) -> None:
    used = frozenset(data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))) if slots else frozenset()
    known = data.draw(st.dictionaries(st.integers(0, 20), st.tuples(places, st.booleans())))
    found = handed_on(slots, known, used)
    left = [slot for slot in sorted(slots) if slot not in used]
    assert [(one.prompt, one.began) for one in found] == [(slots[slot].prompt, slots[slot].began) for slot in left]
    for slot, one in zip(left, found, strict=True):
        assert (one.place, one.finished) == known.get(slot, (slots[slot].place, slots[slot].finished))


@pytest.mark.parametrize("file", ["../rank-0000.spare", "rank-0000.journal", "/etc/passwd", "rank-0000.spare\n", ""])
def test_only_files_of_groups_that_are_handed_on_are_named(file: str) -> None:
    with pytest.raises(ValueError, match="not a file of groups"):
        Carried.from_list([1, 2, False, [3, "f", file, 0, 1]])


@pytest.mark.parametrize("number", [-1, 1.5, float("inf"), "1", None, True])
def test_numbers_that_name_nothing_are_refused(number: object) -> None:
    """A negative one would take another prompt, from the end of the list, without a word."""
    for raw in ([number, 1, False, None], [1, number, False, None], [1, 1, False, [3, "f", "rank-0.spare", number, 1]]):
        with pytest.raises(ValueError, match="no number from 0"):
            Carried.from_list(raw)


def test_what_ends_a_call_goes_over_the_store() -> None:
    enough = Enough(3, frozenset({5, 1}), signal=True)
    assert Enough.from_values(json.loads(json.dumps(enough.to_values()))) == enough
    assert Enough.from_values(None) is None
