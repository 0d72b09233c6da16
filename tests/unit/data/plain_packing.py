"""Packing as it is defined: for one rank after the other, over lists of samples.

The package packs for all ranks at once, over arrays, and has to find the same. A run that was stopped and goes on with
another version of the package repeats its updates bit for bit only as long as this holds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.packing import MicroBatch, Sample, token_count


def pack(
    samples: Sequence[Sample],
    *,
    dp_size: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    share_prompts: bool,
    multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Return result[dp_rank][micro_batch], a list of samples; see the package's function of this name."""
    ordered = sorted(samples)
    if not ordered:
        return [[] for _ in range(dp_size)]
    if micro_batch_size is not None:
        return _by_count(ordered, dp_size, micro_batch_size, share_prompts, multiple)
    assert micro_batch_tokens is not None
    ranks = _deal(ordered, dp_size, micro_batch_tokens, share_prompts)
    packed = [_fill(_units(rank, micro_batch_tokens, share_prompts), micro_batch_tokens) for rank in ranks]
    _equalise(packed, share_prompts, multiple)
    for rank in packed:  # the heaviest first: what does not fit into memory fails at once
        rank.sort(key=lambda batch: (-token_count(batch, share_prompts), batch))
    return packed


def _by_count(
    ordered: list[Sample], dp_size: int, size: int, share_prompts: bool, multiple: int
) -> list[list[MicroBatch]]:
    """Cut the samples into consecutive, even chunks of at most `size`; of exactly `size` where that divides them."""
    assert size >= 1
    per_rank = -(-len(ordered) // (size * dp_size * multiple)) * multiple
    chunks = per_rank * dp_size
    each, extra = divmod(len(ordered), chunks)
    cuts = [each * i + min(i, extra) for i in range(chunks + 1)]
    batches = [ordered[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    costs = [token_count(batch, share_prompts) for batch in batches]
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [(0, rank) for rank in range(dp_size)]
    for number in sorted(range(chunks), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(number)
        if len(ranks[rank]) < per_rank:
            heapq.heappush(loads, (load + costs[number], rank))
    return [[batches[i] for i in sorted(rank)] for rank in ranks]


def _units(samples: Sequence[Sample], budget: int, share_prompts: bool) -> list[tuple[int, list[Sample]]]:
    """Return (tokens, samples) that go into a micro-batch together: groups, or parts of those over the budget."""
    if not share_prompts:
        return [(s.prompt_len + s.response_len - 1, [s]) for s in samples]
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.slot, []).append(sample)
    units = []
    for members in groups.values():
        prompt = members[0].prompt_len
        assert all(s.prompt_len == prompt for s in members), "one group has one prompt"
        responses = sum(s.response_len - 1 for s in members)
        if prompt + responses <= budget:
            units.append((prompt + responses, members))
        else:
            for part in _fill([(s.response_len - 1, [s]) for s in members], budget - prompt):
                units.append((prompt + sum(s.response_len - 1 for s in part), part))
    return units


def _fill(units: list[tuple[int, list[Sample]]], budget: int) -> list[MicroBatch]:
    """Fill micro-batches best-fit decreasing: each unit goes where it leaves the least room, or into a new one."""
    batches: list[MicroBatch] = []
    room: list[tuple[int, int]] = []  # (free tokens, number of the micro-batch), ascending
    for cost, members in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        place = bisect_left(room, (cost, -1))
        if place == len(room):
            batches.append(list(members))
            insort(room, (budget - cost, len(batches) - 1))
        else:
            free, number = room.pop(place)
            batches[number].extend(members)
            insort(room, (free - cost, number))
    for batch in batches:
        batch.sort()
    return batches


def _deal(ordered: list[Sample], dp_size: int, budget: int, share_prompts: bool) -> list[list[Sample]]:
    """Return each rank's samples, of nearly equal cost: longest unit first to the lightest rank, then evened out."""
    if dp_size == 1:
        return [ordered]
    ranks: list[list[Sample]] = [[] for _ in range(dp_size)]
    loads = [(0, rank) for rank in range(dp_size)]
    for cost, members in sorted(_units(ordered, budget, share_prompts), key=lambda unit: (-unit[0], unit[1])):
        load, rank = heapq.heappop(loads)
        ranks[rank].extend(members)
        heapq.heappush(loads, (load + cost, rank))
    if share_prompts:  # single samples cannot be dealt much better than longest first
        costs = np.array([token_count(rank, True) for rank in ranks])
        for _ in range(4 * dp_size):
            if not _move_part(ranks, costs):
                break
    return [sorted(rank) for rank in ranks]


def _move_part(ranks: list[list[Sample]], loads: npt.NDArray[np.int64]) -> bool:
    """Move a part of a group from the heaviest to the lightest rank; return False where the added prompt costs more.

    `loads` are the costs of the ranks, and are kept.
    """
    heavy, light = int(loads.argmax()), int(loads.argmin())  # the first of several
    gap = int(loads[heavy] - loads[light])
    there = {s.slot for s in ranks[light]}
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(ranks[heavy]):
        groups.setdefault(sample.slot, []).append(sample)
    best: tuple[int, list[Sample]] = (0, [])
    for number, members in groups.items():
        pays = 0 if number in there else members[0].prompt_len
        wanted = (gap - pays) // 2
        part: list[Sample] = []
        moved = 0
        for sample in sorted(members, key=lambda s: (-s.response_len, s.index)):
            if moved + sample.response_len - 1 <= wanted:
                part.append(sample)
                moved += sample.response_len - 1
        whole = members[0].prompt_len if len(part) == len(members) else 0
        gain = min(moved + whole, gap - pays - moved)  # by how much the heavier of the two gets lighter
        if gain > best[0]:
            best = (gain, part)
    if best[0] <= 0.01 * loads[heavy]:
        return False
    chosen = set(best[1])
    ranks[heavy] = [s for s in ranks[heavy] if s not in chosen]
    ranks[light].extend(best[1])
    for rank in (heavy, light):
        loads[rank] = token_count(ranks[rank], True)
    return True


def _equalise(packed: list[list[MicroBatch]], share_prompts: bool, multiple: int) -> None:
    """Give every rank as many micro-batches as the rank with the most, rounded up to a multiple of `multiple`.

    The costliest micro-batch that can be split is split first.
    """
    count = -(-max(len(rank) for rank in packed) // multiple) * multiple
    for rank in packed:
        while len(rank) < count:
            divisible = [batch for batch in rank if len(batch) > 1]
            if divisible:
                rank.append(_split(max(divisible, key=lambda b: (token_count(b, share_prompts), b)), share_prompts))
                continue
            # Only single samples here: take one from a rank that has more samples than micro-batches to fill.
            donor = max(packed, key=lambda other: sum(map(len, other)))
            if sum(map(len, donor)) <= count:
                rank.append([])
            else:
                batch = max(donor, key=lambda b: (len(b), b))
                cheapest = min(batch, key=lambda s: (s.response_len, s))
                batch.remove(cheapest)
                rank.append([cheapest])


def _split(batch: MicroBatch, share_prompts: bool) -> MicroBatch:
    """Cut the end off a sorted micro-batch and return it: near half of its tokens, between two groups if it has any."""
    total = token_count(batch, share_prompts)
    borders = [i for i in range(1, len(batch)) if batch[i].slot != batch[i - 1].slot]
    if not share_prompts or not borders:
        borders = list(range(1, len(batch)))
    cut = min(borders, key=lambda i: (abs(2 * token_count(batch[:i], share_prompts) - total), i))
    tail = batch[cut:]
    del batch[cut:]
    return tail
