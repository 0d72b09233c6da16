"""The exchange of samples among ranks: threads with a gloo group of their own, real transport, no model.

Catches samples and results that go to the wrong rank or change on the way, bytes of a rank that grow with the number of
ranks, and a file that two ranks read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.data.packing import Assignment, pack
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.exchange import transport, wire_format
from gspo_hpc.exchange.exchange import Exchange, Replicas
from gspo_hpc.exchange.prompts import PIECE_BYTES, SharedPrompts
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.exchange.wire_format import FIELDS, Item
from tests.torch.exchange.ranks import on_ranks


def make_groups(count: int, samples: int = 3, length: int = 20, seed: int = 0) -> list[Group]:
    """Groups with everything that travels; the last completion of each has one token, and one group no experts."""
    rng = np.random.default_rng(seed)

    def floats(n: int) -> np.ndarray:
        return rng.standard_normal(n).astype(np.float32)

    def experts(n: int, slot: int) -> np.ndarray | None:
        return None if slot == 1 else rng.integers(0, 300, (n, 2, 2)).astype(np.uint16)

    def completion(slot: int, index: int) -> Completion:
        n = 1 if index == samples - 1 else int(rng.integers(2, length))
        environment = np.append(rng.integers(0, 2, n - 1), 0).astype(np.uint8) if index == 1 else None
        sampled = n if environment is None else int((environment == 0).sum())
        return Completion(
            rng.integers(0, 90, n).astype(np.int32),
            floats(sampled),
            f"answer {slot}-{index}",
            "stop",
            7,
            reward=0.1 * index,
            reward_parts={"right": 0.1 * index},
            failure="it raised" if (slot + index) % 4 == 0 else None,
            excluded=index == 1,
            advantage=float(np.float32(index) - np.float32(0.3)),
            old_logprobs=floats(sampled),
            reference_logprobs=floats(sampled),
            selected=rng.integers(0, 2, sampled).astype(np.uint8),
            experts=experts(n - 1, slot),
            num_cached_tokens=16 * index,
            environment=environment,
        )

    return [
        Group(
            slot,
            Prompt(slot + 10, rng.integers(0, 90, 4 + slot % 3).astype(np.int32), f"question {slot}", {"a": slot}),
            tuple(completion(slot, index) for index in range(samples)),
            experts(4 + slot % 3, slot),
        )
        for slot in range(count)
    ]


def layout(link: Transport, dp: int) -> Exchange:
    """An exchange of ranks of which those with the same remainder by `dp` compute together."""
    members = [rank for rank in range(link.world_size) if rank % dp == link.rank % dp]
    return Exchange(link, Replicas(tuple(range(dp)), link.rank % dp, tuple(members)))


def dealt_of(exchange: Exchange, groups: Any, size: int | None = None, tokens: int | None = None) -> Assignment:
    """Who computes what, as every rank decides it."""
    return pack(
        groups.table.samples(),
        dp_size=len(exchange.replicas.leaders),
        rank=exchange.replicas.own,
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        share_prompts=True,
    )


def equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other))


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_a_rank_gets_what_its_replica_computes_and_nothing_else(
    ranks: int, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, bit for bit, in chunks of a payload that cut arrays anywhere."""
    monkeypatch.setattr(transport, "CHUNK_BYTES", 100)
    whole = make_groups(7)

    def work(link: Transport) -> None:
        exchange = layout(link, dp)
        groups = exchange.gather_table(g for g in whole if (g.slot * g.slot) % ranks == link.rank)
        assert groups.table.slots == list(range(7))
        assignment = dealt_of(exchange, groups, tokens=64)
        own = {(s.slot, s.index) for batch in assignment.batches for s in batch}
        found = exchange.fetch(groups, assignment, training=True, experts=True)
        assert set(found) == {slot for slot, _ in own}
        for slot, group in found.items():
            assert equal(group.prompt.tokens, whole[slot].prompt.tokens)
            assert equal(group.prompt_experts, whole[slot].prompt_experts)
            for index, completion in enumerate(group.completions):
                there = whole[slot].completions[index]
                if (slot, index) not in own:
                    assert not len(completion.tokens)
                    continue
                assert (completion.advantage, completion.excluded) == (there.advantage, there.excluded)
                assert completion.num_cached_tokens == there.num_cached_tokens
                for name in ("tokens", "logprobs", "old_logprobs", "reference_logprobs", "selected", "experts"):
                    assert equal(getattr(completion, name), getattr(there, name)), name
        bare = exchange.fetch(groups, assignment, training=False, experts=False)
        chosen = [c for group in bare.values() for c in group.completions if len(c.tokens)]
        assert all(
            c.old_logprobs is c.reference_logprobs is c.selected is c.experts is None and not c.logprobs.any()
            for c in chosen
        )

    on_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (6, 3)])
def test_results_return_to_the_ranks_that_hold_the_groups(ranks: int, dp: int) -> None:
    """Where two replicas computed a part of one group, the experts of its prompt are those of the first replica."""
    whole = make_groups(5)

    def work(link: Transport) -> None:
        exchange = layout(link, dp)
        groups = exchange.gather_table(g for g in whole if g.slot % ranks == link.rank)
        assignment = dealt_of(exchange, groups, size=1)  # one by one, so that replicas share groups
        slots = assignment.samples[:, 0]
        assert dp == 1 or {*slots[assignment.ranks == 0]} & {*slots[assignment.ranks == 1]}
        place = exchange.replicas.own
        keys = [(s.slot, s.index) for batch in assignment.batches for s in batch]
        logprobs = {key: whole[key[0]].completions[key[1]].logprobs + place for key in keys}
        experts = {key: np.full((2, 1, 1), place, np.uint8) for key in (*keys, *((slot, -1) for slot, _ in keys))}
        values, chosen = exchange.return_results(groups, assignment, logprobs, experts)
        by = dict(zip(map(tuple, assignment.samples[:, :2].tolist()), assignment.ranks.tolist(), strict=True))
        wanted = {(slot, index) for slot, group in groups.own.items() for index in range(len(group.completions))}
        assert set(values) == wanted
        for (slot, index), array in values.items():
            assert equal(array, whole[slot].completions[index].logprobs + by[slot, index])
        for slot in groups.own:
            first = min(number for (other, _), number in by.items() if other == slot)
            assert chosen[slot, -1].tolist() == [[[first]]] * 2
        assert exchange.return_results(groups, assignment, logprobs, None)[1] == {}

    on_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "dp"), [(2, 2), (8, 8), (8, 2)])
def test_a_rank_receives_no_more_than_it_computes_and_sends_no_more_than_it_holds(ranks: int, dp: int) -> None:
    """Whatever the number of ranks; in a replica of several, samples are handed on, by each rank to at most two."""
    whole = make_groups(2 * ranks, length=4000, seed=3)

    def work(link: Transport) -> None:
        exchange = layout(link, dp)
        groups = exchange.gather_table(g for g in whole if (g.slot + 1) % ranks == link.rank)
        assignment = dealt_of(exchange, groups, tokens=9000)
        received, sent = link.received, link.sent
        exchange.fetch(groups, assignment, training=True, experts=False)
        mine = [s for batch in assignment.batches for s in batch]
        row = wire_format.WIDTH * 8 + 4 * 8 + 4 * 8  # header, padding, the tokens of a prompt
        need = sum((4 * 4 + 1) * s.response_len + 2 * row for s in mine)
        held = sum((4 * 4 + 1) * len(c.tokens) + 2 * row for g in groups.own.values() for c in g.completions)
        assert link.received - received <= need
        assert link.sent - sent <= held + 2 * need * (len(exchange.replicas.members) > 1)

    on_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (6, 3), (5, 5)])
def test_a_number_of_every_replica_is_counted_once(ranks: int, dp: int) -> None:
    def work(link: Transport) -> None:
        exchange = layout(link, dp)
        numbers = [7, 100, 3, 5, 2][:dp]
        assert exchange.spread(numbers[exchange.replicas.own]) == (max(numbers), sum(numbers))

    on_ranks(ranks, work)


def test_prompts_come_out_of_the_store_as_they_went_in_and_leave_it() -> None:
    """Long ones too: the store of a job refuses more than 8 MiB under one key, and ends the connection."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    tests = [{"in": "\ud800 é\n" * 900_000, "out": 1e-7}, None]  # 18 MiB of JSON
    prompts = {
        slot: Prompt(50 - slot, np.arange(length, dtype=np.int32), "t" * size, fields)
        for slot, length, size, fields in (
            (7, 3, 5, {"answer": 12}),
            (0, 0, 0, {}),
            (3, 1000, 2_000_000, {"tests": tests}),
            (4, 9, PIECE_BYTES - 400, {}),
        )
    }
    before = store.num_keys()
    shared = SharedPrompts(store, "call")
    shared.publish(prompts)
    longest = max(len(store.get(key)) for key in store.list_keys() if key.startswith("call"))
    assert longest == PIECE_BYTES
    assert shared.fetch([]) == []
    for slots in ([3, 7], [0], [4]):
        for slot, found in zip(slots, shared.fetch(slots), strict=True):
            given = prompts[slot]
            assert (found.index, found.text, found.fields) == (given.index, given.text, given.fields)
            assert equal(found.tokens, given.tokens) and found.tokens.flags.writeable
    assert store.num_keys() == before


def test_prompts_are_there_once_they_are_published() -> None:
    """For other ranks, too, and for good: what they fetch does not come back.

    torch's store takes values without an answer, and some of them again where it has not read the whole message yet.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other, before = store.clone(), store.num_keys()
    prompts = {slot: Prompt(slot, np.arange(2000, dtype=np.int32), "", {}) for slot in range(600)}
    for call in range(5):
        shared = SharedPrompts(store, f"call {call}")
        shared.publish(prompts)
        assert other.num_keys() == before + len(prompts)
        found = SharedPrompts(other, f"call {call}").fetch(list(prompts))
        assert [prompt.index for prompt in found] == list(prompts) and store.num_keys() == before


def test_rank_0_is_shown_the_first_groups_and_all_failures() -> None:
    whole = make_groups(5)
    failed = Counter(c.failure for g in whole for c in g.completions if c.failure is not None)

    def work(link: Transport) -> None:
        exchange = layout(link, 3)
        shown = exchange.gather_samples(exchange.gather_table(g for g in whole if (g.slot + 1) % 3 == link.rank), 2)
        if link.rank:
            assert not shown.groups and not shown.failures
            return
        assert [g.prompt.text for g in shown.groups] == ["question 0", "question 1"]
        assert [g.completions[0].text for g in shown.groups] == ["answer 0-0", "answer 1-0"]
        assert shown.groups[1].prompt.fields == {"a": 1} and shown.failures == failed

    on_ranks(3, work)


def test_values_of_all_ranks_are_everywhere() -> None:
    """Each rank gets them by slot, also one that holds none."""

    def work(link: Transport) -> None:
        found = layout(link, 1).gather_values({slot: slot / 7 for slot in range(5) if slot % 2 == link.rank})
        assert list(found.items()) == [(slot, slot / 7) for slot in range(5)]

    on_ranks(3, work)


def test_texts_of_all_groups_come_to_rank_0_alone() -> None:
    """Also where rank 0 holds none, and where a rank has nothing to say."""
    whole = make_groups(5)

    def work(link: Transport) -> None:
        exchange = layout(link, 1)
        groups = exchange.gather_table(group for group in whole if group.slot % 2 + 1 == link.rank)
        found = exchange.gather_texts(groups, {slot: {"of": [slot, "é"]} for slot in groups.own})
        assert list(found.items()) == ([] if link.rank else [(slot, {"of": [slot, "é"]}) for slot in range(5)])

    on_ranks(4, work)


def test_every_file_is_read_by_one_rank_and_the_first_of_two_counts() -> None:
    whole = make_groups(4)
    other = [replace(group, prompt=replace(group.prompt, text="another")) for group in whole]
    files = {"a": [whole[0]], "b": [other[0], whole[2]], "c": [other[2], whole[3]], "d": []}
    read: list[str] = []

    def work(link: Transport) -> dict[int, str]:
        def open_file(name: str) -> dict[int, Group]:
            read.append(name)
            return {group.slot: group for group in files[name]}

        def listed() -> Sequence[str]:
            assert link.rank == 0
            return sorted(files)

        own, every = Exchange(link).partition_files(listed, open_file)
        assert every == {0, 2, 3}
        return {slot: group.prompt.text for slot, group in own.items()}

    parts = on_ranks(3, work)
    assert sorted(read) == sorted(files)
    assert sorted(entry for part in parts for entry in part.items()) == [
        (0, "question 0"),
        (2, "question 2"),
        (3, "question 3"),
    ]


arrays = st.one_of(
    st.none(),
    st.builds(
        lambda kind, shape, seed: np.random.default_rng(seed).integers(0, 200, shape).astype(kind),
        st.sampled_from(["<i4", "<f4", "u1", "<u2"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
        st.integers(0, 9),
    ),
)
items = st.builds(Item, st.integers(0, 9), st.integers(-1, 9), st.lists(arrays, max_size=FIELDS).map(tuple))


@settings(deadline=None, max_examples=50)
@given(st.lists(items, max_size=5), st.integers(1, 40))
def test_items_come_out_of_their_bytes_as_they_went_in(sent: list[Item], size: int) -> None:
    header = wire_format.header_of(sent)
    pieces = [piece.copy() for piece in wire_format.chunks(sent, size)]
    assert all(len(piece) == size for piece in pieces[:-1])
    payload = np.concatenate([np.empty(0, np.uint8), *pieces])
    assert len(payload) == wire_format.payload_bytes(header)
    for one, other in zip(sent, wire_format.unpack(header, payload), strict=True):
        assert (one.slot, one.index) == (other.slot, other.index)
        padded = (*one.arrays, *[None] * (FIELDS - len(one.arrays)))
        assert all(equal(a, b) for a, b in zip(padded, other.arrays, strict=True))


def test_an_array_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="arrays of float64 with 1 dimensions cannot be sent"):
        wire_format.header_of([Item(0, 0, (np.zeros(1),))])


def test_a_gathered_text_reaches_rank_0_alone_with_what_each_rank_gave() -> None:
    def work(link: Transport) -> tuple[bytes | None, int]:
        found = link.tree_gather(b"%d" % link.rank, b" ".join)
        return found, link.received

    for ranks in (1, 2, 7):
        (whole, _), *others = on_ranks(ranks, work)
        assert whole is not None and sorted(map(int, whole.split())) == list(range(ranks))
        assert all(found is None for found, _ in others)
        assert all(received == 0 for rank, (_, received) in enumerate(others, 1) if 2 * rank + 1 >= ranks)
