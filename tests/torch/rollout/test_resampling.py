"""The selection of dynamic sampling, as a function of rewards alone.

It takes seconds. It would catch a selection that depends on the clock, on what was finished when a run was killed or on
how many prompts are drawn at once, one that draws more than it may or never ends, and a prompt that is trained on twice
or passed over.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Rollout
from gspo_hpc.data.records import Group, Prompt
from gspo_hpc.rollout.drawing import Drawing, Judged
from gspo_hpc.rollout.resampling import DrawLimits, Draws, draws


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[DrawLimits, list[bool]]:
    """Limits, and for every prompt that may be drawn whether its group has signal."""
    wanted = draw(st.integers(1, 8))
    most = wanted * draw(st.integers(1, 6))
    first = draw(st.integers(wanted, most))
    return DrawLimits(wanted, most, first), draw(st.lists(st.booleans(), min_size=most, max_size=most))


def complete(limits: DrawLimits, signal: list[bool]) -> Draws:
    """The end of a rollout that nobody interrupts."""
    known: dict[int, bool] = {}
    while (found := draws(known, limits)).todo:
        assert found.drawn <= limits.most
        known |= {slot: signal[slot] for slot in found.todo}
    return found


@given(rollouts())
def test_the_first_groups_with_signal_are_chosen_and_no_prompt_behind_them_is_used_up(
    rollout: tuple[DrawLimits, list[bool]],
) -> None:
    limits, signal = rollout
    found = complete(limits, signal)
    slots = [slot for slot in range(limits.most) if signal[slot]]
    if len(slots) >= limits.wanted:
        assert list(found.chosen) == slots[: limits.wanted]
        assert found.used == found.chosen[-1] + 1 <= found.drawn and found.filled == 0
        return
    others = [slot for slot in range(limits.most) if not signal[slot]]
    assert found.filled == limits.wanted - len(slots)
    assert list(found.chosen) == sorted(slots + others[: found.filled])
    assert found.used == found.drawn == limits.most


@given(rollouts(), st.data())
def test_how_many_prompts_are_drawn_at_once_changes_nothing_that_is_trained_on(
    rollout: tuple[DrawLimits, list[bool]], data: st.DataObject
) -> None:
    limits, signal = rollout
    other = DrawLimits(limits.wanted, limits.most, data.draw(st.integers(limits.wanted, limits.most)))
    one, another = complete(limits, signal), complete(other, signal)
    assert (one.chosen, one.used, one.filled) == (another.chosen, another.used, another.filled)


@given(rollouts(), st.data())
def test_a_rollout_that_is_killed_at_any_moment_ends_as_the_uninterrupted_one(
    rollout: tuple[DrawLimits, list[bool]], data: st.DataObject
) -> None:
    """The journal has any part of the newest round, in any order, and all of the rounds before."""
    limits, signal = rollout
    known: dict[int, bool] = {}
    while (found := draws(known, limits)).todo:
        finished = data.draw(st.lists(st.sampled_from(found.todo), min_size=1, unique=True))
        again = draws(known | {slot: signal[slot] for slot in finished}, limits)
        if not again.todo or set(again.todo).isdisjoint(found.todo):
            assert set(finished) == set(found.todo)
        else:  # the same round, with what is left of it
            assert again.todo == tuple(slot for slot in found.todo if slot not in finished)
            assert (again.drawn, again.rounds) == (found.drawn, found.rounds)
        known |= {slot: signal[slot] for slot in finished}
    assert found == complete(limits, signal)


def test_a_round_is_as_large_as_the_share_of_groups_with_signal_makes_likely() -> None:
    limits = DrawLimits(wanted=4, most=40, first=4)
    half = draws({0: True, 1: False, 2: True, 3: False}, limits)
    assert half.todo == (4, 5, 6, 7) and half.rounds == 2
    none = draws(dict.fromkeys(range(4), False), limits)
    assert none.todo == tuple(range(4, 20))
    last = draws(dict.fromkeys(range(36), False), limits)
    assert last.todo == tuple(range(36, 40))
    more = DrawLimits(wanted=4, most=40, first=8)
    assert draws({}, more).todo == tuple(range(8))
    assert draws(dict.fromkeys(range(8), True), more) == Draws(8, 1, (), (0, 1, 2, 3), 4)


@given(rollouts(), st.data())
def test_a_rollout_that_does_not_wait_ends_with_enough_groups_and_with_those_that_it_must_have(
    rollout: tuple[DrawLimits, list[bool]], data: st.DataObject
) -> None:
    limits, signal = rollout
    limits = replace(limits, waits=False)
    required = frozenset(data.draw(st.lists(st.integers(0, limits.first - 1), unique=True, max_size=limits.wanted)))
    known: dict[int, bool] = {}
    while (found := draws(known, limits, required)).todo:
        good = sum(known.values())
        assert good < limits.wanted or not required <= known.keys(), "it had enough"
        slot = data.draw(st.sampled_from(found.todo))  # which the clock decides
        known[slot] = signal[slot]
    assert required <= known.keys() and len(found.chosen) == limits.wanted
    assert set(found.chosen) <= known.keys() and found.used == found.drawn <= limits.most
    # The groups that older rollouts began have the lowest slots, so the oldest are trained on first.
    finished = [slot for slot in sorted(known) if known[slot]]
    assert list(found.chosen) == finished[: limits.wanted] or found.filled == limits.wanted - len(finished) > 0
    assert draws(known, limits, required) == found, "a resumed rollout has the same end"


def test_a_rollout_is_never_smaller_than_what_is_carried_into_it() -> None:
    limits = DrawLimits.of(Rollout(unfinished="continue", oversampling_factor=1.5), 8)
    assert limits == DrawLimits(8, 12, 12, waits=False, open=16)
    assert limits.with_carried(4) == limits
    assert limits.with_carried(16) == DrawLimits(8, 16, 16, waits=False, open=16)
    dynamic = Rollout(unfinished="drop", oversampling_factor=1.5, dynamic_sampling=True, max_num_gen_batches=3)
    assert DrawLimits.of(dynamic, 8) == DrawLimits(8, 24, 12, waits=False)
    assert DrawLimits.of(Rollout(oversampling_factor=1.5), 8) == DrawLimits(8, 8, 8)


def test_no_more_groups_are_open_than_the_next_rollouts_train_on() -> None:
    """A second round of four times what lacks would be, and the oldest groups would find no room."""
    limits = DrawLimits.of(
        Rollout(unfinished="continue", oversampling_factor=1.5, dynamic_sampling=True, max_num_gen_batches=9), 8
    )
    for found in range(8):
        known = {slot: slot < found for slot in range(12)}
        drawn = draws(known, limits).drawn
        assert 12 < drawn and drawn - (12 - found) <= 16


def test_groups_that_were_carried_are_spread_over_the_updates() -> None:
    """They have the lowest slots, and would make up the first update."""
    tokens = np.zeros(1, np.int32)
    groups = [Group(slot, Prompt(slot, tokens, "", {}), ()) for slot in range(24)]
    config = from_dict({"rollout": {"unfinished": "continue", "oversampling_factor": 1.5}})
    table: Any = SimpleNamespace(slots=list(range(24)))
    drawing = Drawing(DrawLimits.of(config.rollout, 16), config, lambda own: Judged(table, {}, {}))
    drawing.add({group.slot: group for group in groups}, ())
    chosen = drawing.chosen()
    assert sorted(group.slot for group in chosen) == list(range(16)), "each has a place of its own"
    assert sorted(group.prompt.index for group in chosen) == list(range(16)), "the first of the slots"
    first = sum(group.prompt.index < 8 for group in chosen if group.slot < 8)
    assert 2 <= first <= 6, "eight that were carried, over two updates of eight"
    assert [group.prompt.index for group in drawing.spare()] == list(range(16, 24))
