"""Deal samples to data-parallel ranks and their micro-batches: no padding, equal counts, a pure function of the input.

The cost of a micro-batch is the number of tokens that the model computes. A completion is fed without its last token,
which is only predicted; with shared prompts, a prompt is fed once per micro-batch for all of its completions there. So
completions of one group stay together where they fit, and a part that is split off pays for the prompt again. Prompts
that share a prefix are fed only once as far as they do (``gspo_hpc.ops.batch``); this is not counted, since a budget is
an upper bound.

Under a token budget, groups are dealt to ranks (longest first, to the rank with the least load), loads are evened out
by moving parts of groups, and every rank fills its micro-batches best-fit decreasing. Ranks with fewer micro-batches
than others split some, because every rank of a pipeline or data-parallel layout has to run the same number.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# A part of a group moves to another rank only if that lowers the heavier load by this share, since it adds a prompt.
WORTH_MOVING = 0.01


class Sample(NamedTuple):
    """One completion: `index` within the group at `slot` of the rollout. Lengths are in tokens, both at least 1."""

    slot: int
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    prompt_len: int
    response_len: int


MicroBatch = list[Sample]


def token_count(samples: Sequence[Sample], share_prompts: bool) -> int:
    """Return the number of tokens that the model computes for these samples in one micro-batch."""
    responses = sum(sample.response_len - 1 for sample in samples)
    if share_prompts:
        return responses + sum({sample.slot: sample.prompt_len for sample in samples}.values())
    return responses + sum(sample.prompt_len for sample in samples)


def pack(
    samples: Sequence[Sample],
    *,
    dp_size: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    share_prompts: bool,
    multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Deal every sample to exactly one micro-batch: result[dp_rank][micro_batch] is a list of samples.

    Give either `micro_batch_size` (completions) or `micro_batch_tokens` (a budget of computed tokens that no
    micro-batch exceeds). All ranks get the same number of micro-batches, a multiple of `multiple`, none when there are
    no samples; one is empty only if there are fewer samples than micro-batches. The order of the input does not matter.
    Raises ValueError for a sample that is over the budget by itself.
    """
    assert (micro_batch_size is None) != (micro_batch_tokens is None), "one of micro_batch_size and micro_batch_tokens"
    assert dp_size >= 1
    ordered = sorted(samples)
    assert len({(s.slot, s.index) for s in ordered}) == len(ordered), "a sample was given twice"
    assert all(s.prompt_len >= 1 and s.response_len >= 1 for s in ordered), "empty prompts and responses do not train"
    if not ordered:
        return [[] for _ in range(dp_size)]
    if micro_batch_size is not None:
        return _by_count(ordered, dp_size, micro_batch_size, share_prompts, multiple)
    assert micro_batch_tokens is not None
    _check_budget(ordered, micro_batch_tokens)
    ranks = _deal(ordered, dp_size, micro_batch_tokens, share_prompts)
    packed = [_fill(_units(rank, micro_batch_tokens, share_prompts), micro_batch_tokens) for rank in ranks]
    _equalise(packed, share_prompts, multiple)
    for rank in packed:  # the heaviest first: what does not fit into memory fails at once
        rank.sort(key=lambda batch: (-token_count(batch, share_prompts), batch))
    return packed


def evenness(
    dealt: Sequence[Sequence[MicroBatch]], micro_batch_tokens: int | None, share_prompts: bool
) -> dict[str, float]:
    """Return how even a result of :func:`pack` is.

    `packing/imbalance` is the largest load of a rank over the mean load, in tokens; `packing/micro_batches` is their
    number on one rank; `packing/fill`, under a token budget, is the share of the budget that is used.
    """
    loads = [sum(token_count(batch, share_prompts) for batch in rank) for rank in dealt]
    found = {
        "packing/imbalance": max(loads) * len(loads) / max(1, sum(loads)),
        "packing/micro_batches": float(len(dealt[0])),
    }
    if micro_batch_tokens is not None:
        found["packing/fill"] = sum(loads) / max(1, micro_batch_tokens * sum(map(len, dealt)))
    return found


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


def _check_budget(ordered: list[Sample], budget: int) -> None:
    longest = max(ordered, key=lambda s: (s.prompt_len + s.response_len, -s.slot, -s.index))
    need = longest.prompt_len + longest.response_len - 1
    if need > budget:
        raise ValueError(
            f"micro_batch_tokens ({budget}) is below one sample: completion {longest.index} of prompt {longest.slot} "
            f"computes {longest.prompt_len} prompt + {longest.response_len} response - 1 = {need} tokens; give at "
            f"least {need}, or shorten rollout.max_prompt_length or rollout.max_response_length"
        )


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
    if best[0] <= WORTH_MOVING * loads[heavy]:
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
