"""Prompts that are retired: which are, and in which order the others are asked (seconds).

It would catch an order that depends on how many prompts are drawn at once or on when a run was killed, a prompt that is
retired and comes again, one that an epoch forgets, one that comes twice in a rollout, and a pass rate that depends on
which rank holds a group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.data.prompts import NONE_RETIRED, Position, PromptStream
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.retired import Retired, Retirement, pass_rates, retirements
from gspo_hpc.data.table import GroupTable, concatenate

Drawn = Callable[[int], Sequence[int]]


def waiting(previous: list[int], drawn: list[int], window: int) -> list[int]:
    """`previous` in the order of `drawn`, where nothing recurs sooner than `window` places after its own."""
    order = list[int]()
    for place in range(len(previous)):
        free = previous[: len(previous) - window + 1 + place]
        order.append(next(one for one in drawn if one in free and one not in order))
    return order


class Plain:
    """The order in plain Python: lists of what an epoch still has, without positions, sizes or masks."""

    def __init__(self, n: int, drawn: Drawn, shuffle: bool, most: int, least: int) -> None:
        self.drawn, self.shuffle, self.most, self.least, self.n = drawn, shuffle, most, least, n
        self.epoch, self.gone = 0, set[int]()
        self.order = list(drawn(0)) if shuffle else list(range(n))
        self.rest = list(self.order)

    def following(self, order: list[int], epoch: int) -> list[int]:
        alive = [one for one in order if one not in self.gone]
        if not self.shuffle:
            return sorted(alive)
        window = min(self.most, max(self.least, len(alive) // 2), len(alive))
        return waiting(alive, list(self.drawn(epoch)), window)

    def rollout(self, count: int) -> list[int]:
        """The prompts of a rollout that uses so many up; an epoch is over as soon as its last place is."""
        taken, epoch, order, rest = list[int](), self.epoch, self.order, self.rest
        while len(taken) < count:
            while rest and len(taken) < count:
                if (one := rest[0]) not in self.gone:
                    taken.append(one)
                rest = rest[1:]
            if not rest:
                epoch, order = epoch + 1, self.following(order, epoch + 1)
                rest = order
        self.epoch, self.order, self.rest = epoch, order, rest
        return taken


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 20), st.integers(0, 2**40), st.booleans(), st.data())
def test_prompts_are_those_of_plain_lists_however_they_are_drawn_and_resumed(
    n: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    least = data.draw(st.integers(1, n))
    most = data.draw(st.integers(least, n))
    fresh = PromptStream(n, seed, shuffle, most, least)
    plain = Plain(n, lambda epoch: fresh._drawn(epoch).tolist(), shuffle, most, least)
    stream, position = fresh, Position()
    visits = dict[int, list[int]]()
    for number in range(14):
        if stream.left(position.retired) < least:
            break
        used = data.draw(st.integers(least, n + least))  # dynamic sampling uses up what it needs
        drawn = used + data.draw(st.integers(0, n))  # and draws more, as the size of its rounds has it
        if data.draw(st.booleans()):  # killed, and resumed from what a checkpoint holds
            stream = PromptStream(n, seed, shuffle, most, least)
            position = Position.from_dict(json.loads(json.dumps(position.to_dict())))
        ahead, _ = stream.take(position, drawn)
        taken, after = stream.take(position, used)
        assert taken == ahead[:used] == plain.rollout(used)
        assert not {one.prompt for one in position.retired.prompts} & set(taken)
        assert len(set(taken[:least])) == least, "a prompt comes twice in a rollout"
        for place, prompt in enumerate(taken):
            visits.setdefault(prompt, []).append(1000 * number + place)
        rates = dict(enumerate(data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=used, max_size=used))))
        more = retirements(rates, taken, number, 0.9)
        position = replace(after, retired=after.retired.with_more(more))
        plain.gone |= {one.prompt for one in more}
        assert {one.prompt for one in position.retired.prompts} == plain.gone
        assert len(position.retired) == len(plain.gone)
    for prompt in set(range(n)) - plain.gone:  # whoever is left was asked once in each epoch that is over
        assert position.epoch <= len(visits.get(prompt, ())) <= position.epoch + 1


def test_without_retired_prompts_orders_are_those_of_a_stream_that_knows_of_none() -> None:
    """A run of an older version goes on with the prompts that it would have had."""
    with_least, without = PromptStream(30, 7, True, 12, 4), PromptStream(30, 7, True, 12)
    assert [with_least.order(epoch).tolist() for epoch in range(5)] == [without.order(e).tolist() for e in range(5)]
    assert with_least.take(Position(1, 20), 25) == without.take(Position(1, 20), 25)
    assert with_least.take(Position(1, 20), 25)[1].retired == NONE_RETIRED


def test_the_same_stream_serves_different_histories() -> None:
    """Server mode asks for rollouts ahead, and a cache of orders must not mix up what was known when."""
    first = Retired((Retirement(0, 0, 1.0), Retirement(1, 0, 1.0)), ((1, 2),))
    second = Retired((Retirement(2, 0, 1.0), Retirement(3, 0, 1.0)), ((1, 2),))
    stream = PromptStream(8, 3, True, 4, 2)
    found = [stream.take(Position(1, 0, history), 6)[0] for history in (first, second, first)]
    assert sorted(found[0]) == [2, 3, 4, 5, 6, 7] and sorted(found[1]) == [0, 1, 4, 5, 6, 7] and found[2] == found[0]


def test_what_is_retired_stays_and_only_used_prompts_count() -> None:
    rates = {0: 1.0, 1: 0.875, 2: 0.9, 3: 1.0}
    found = retirements(rates, [7, 5, 3], 4, 0.9)  # slot 3 was drawn beyond what the rollout used up
    assert found == [Retirement(7, 4, 1.0), Retirement(3, 4, 0.9)]
    assert retirements(rates, [7, 5, 3], 4, None) == []
    retired = NONE_RETIRED.with_more(found).with_more([Retirement(7, 9, 0.95), Retirement(5, 9, 1.0)])
    assert retired.prompts == (*found, Retirement(5, 9, 1.0))
    assert Retired.from_dict(json.loads(json.dumps(retired.to_dict()))) == retired
    with pytest.raises(ValueError, match="all 1 prompts are retired"):
        PromptStream(1, 0, True, 1).take(Position(0, 0, NONE_RETIRED.with_more([Retirement(0, 0, 1.0)])), 1)


def group(slot: int, rewards: Sequence[float | None]) -> Group:
    """A group; None is a completion that no reward function graded."""
    tokens = np.ones(1, np.int32)
    completions = tuple(
        Completion(
            tokens,
            np.zeros(1, np.float32),
            "",
            "stop",
            0,
            reward_parts={} if reward is None else {"number_match": reward},
            excluded=reward is None,
        )
        for reward in rewards
    )
    return Group(slot, Prompt(slot, tokens, "", {}), completions)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_a_pass_rate_is_of_all_completions_of_a_group_whoever_holds_it(order: list[int], ranks: int) -> None:
    groups = [group(0, (1.0, 1.0)), group(1, (1.0, None)), group(2, (0.0, 0.6)), group(3, (0.5, 0.0))]
    tables = [GroupTable.of([groups[slot] for slot in order[rank::ranks]], rank) for rank in range(ranks)]
    table = concatenate(tables)
    assert pass_rates(table, [bool(value > 0.5) for value in table.reward_parts[:, 0]]) == {0: 1, 1: 0.5, 2: 0.5, 3: 0}
