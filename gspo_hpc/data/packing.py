"""Deal samples to data-parallel ranks and their micro-batches: no padding, equal counts, a pure function of the input.

The cost of a micro-batch is the number of tokens that the model computes. A completion is fed without its last token,
which is only predicted; with shared prompts, a prompt is fed once per micro-batch for all of its completions there. So
completions of one group stay together where they fit, and a part that is split off pays for the prompt again. Prompts
that share a prefix are fed only once as far as they do (``gspo_hpc.ops.batch``); this is not counted, since a budget is
an upper bound.

Under a token budget, groups are dealt to ranks (longest first, to the rank with the least load), loads are evened out
by moving parts of groups, and every rank fills its micro-batches best-fit decreasing. Ranks with fewer micro-batches
than others split some, because every rank of a pipeline or data-parallel layout has to run the same number.

Every rank deals all samples, so that all know who computes what, but makes only micro-batches of its own. Of the
others it needs their number, for which best-fit runs over all ranks at once (``gspo_hpc.data.best_fit``).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.best_fit import Ints, best_fit

# A part of a group moves to another rank only if that lowers the heavier load by this share, since it adds a prompt.
WORTH_MOVING = 0.01


class Sample(NamedTuple):
    """One completion: `index` within the group at `slot` of the rollout. Lengths are in tokens, both at least 1."""

    slot: int
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    prompt_len: int
    response_len: int


MicroBatch = list[Sample]
_SLOT, _INDEX, _PROMPT, _RESPONSE = range(4)  # columns of samples in an array


@dataclass(frozen=True, eq=False)
class Assignment:
    """The data-parallel rank that computes each sample, the same on all ranks, and the micro-batches of one rank."""

    samples: Ints  # [N, 4] of Sample, by slot and index
    ranks: Ints  # [N]
    rank: int
    batches: list[MicroBatch]  # of `rank`

    def only(self, slots: Collection[int]) -> Assignment:
        """Return the samples of these slots alone; micro-batches may become empty."""
        kept = np.isin(self.samples[:, _SLOT], list(slots))
        batches = [[sample for sample in batch if sample.slot in slots] for batch in self.batches]
        return replace(self, samples=self.samples[kept], ranks=self.ranks[kept], batches=batches)


def token_count(samples: Sequence[Sample], share_prompts: bool) -> int:
    """Return the number of tokens that the model computes for these samples in one micro-batch."""
    responses = sum(sample.response_len - 1 for sample in samples)
    if share_prompts:
        return responses + sum({sample.slot: sample.prompt_len for sample in samples}.values())
    return responses + sum(sample.prompt_len for sample in samples)


def pack(
    samples: Sequence[Sample] | Ints,
    *,
    dp_size: int,
    rank: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    share_prompts: bool,
    multiple: int = 1,
) -> Assignment:
    """Deal every sample to exactly one micro-batch of one rank; the result has those of data-parallel rank `rank`.

    `samples` are Samples, or the same as an array [N, 4]. Give either `micro_batch_size` (completions) or
    `micro_batch_tokens` (a budget of computed tokens that no micro-batch exceeds). All ranks get the same number of
    micro-batches, a multiple of `multiple`, none when there are no samples; one is empty only if there are fewer
    samples than micro-batches. The order of the input does not matter. Raises ValueError for a sample that is over the
    budget by itself.
    """
    assert (micro_batch_size is None) != (micro_batch_tokens is None), "one of micro_batch_size and micro_batch_tokens"
    assert 0 <= rank < dp_size
    given = np.array(samples, np.int64).reshape(-1, 4)
    ordered = given[np.lexsort((given[:, _INDEX], given[:, _SLOT]))]
    same = ordered[1:, :_PROMPT] == ordered[:-1, :_PROMPT]
    assert not same.all(axis=1).any(), "a sample was given twice"
    assert (ordered[:, _PROMPT:] >= 1).all(), "empty prompts and responses do not train"
    if not len(ordered):
        return Assignment(ordered, np.zeros(0, np.int64), rank, [])
    if micro_batch_size is not None:
        return _by_count(ordered, dp_size, rank, micro_batch_size, share_prompts, multiple)
    assert micro_batch_tokens is not None
    _check_budget(ordered, micro_batch_tokens)
    ranks = _deal(ordered, dp_size, micro_batch_tokens, share_prompts)
    ranks, batches = _fill(ordered, ranks, dp_size, rank, micro_batch_tokens, share_prompts, multiple)
    # The heaviest first: what does not fit into memory fails at once.
    batches.sort(key=lambda batch: (-token_count(batch, share_prompts), batch))
    return Assignment(ordered, ranks, rank, batches)


def evenness(most: int, total: int, ranks: int, batches: int, micro_batch_tokens: int | None) -> dict[str, float]:
    """Return how even a packing is: `most` and `total` are tokens of the fullest of `ranks` ranks and of all.

    `packing/imbalance` is the largest load of a rank over the mean load, in tokens; `packing/micro_batches` is their
    number on one rank, `batches`; `packing/fill`, under a token budget, is the share of the budget that is used.
    """
    found = {"packing/imbalance": most * ranks / max(1, total), "packing/micro_batches": float(batches)}
    if micro_batch_tokens is not None:
        found["packing/fill"] = total / max(1, micro_batch_tokens * ranks * batches)
    return found


def _by_count(ordered: Ints, dp_size: int, rank: int, size: int, share_prompts: bool, multiple: int) -> Assignment:
    """Cut the samples into consecutive, even chunks of at most `size`; of exactly `size` where that divides them."""
    assert size >= 1
    per_rank = -(-len(ordered) // (size * dp_size * multiple)) * multiple
    chunks = per_rank * dp_size
    each, extra = divmod(len(ordered), chunks)
    number = np.arange(chunks + 1)
    cuts = each * number + np.minimum(number, extra)
    chunk = np.repeat(number[:-1], np.diff(cuts))
    costs = _costs(ordered, chunk, chunks, share_prompts)
    ranks, filled = np.empty(chunks, np.int64), [0] * dp_size
    loads = list(range(dp_size))  # load * dp_size + rank
    for place in np.argsort(-costs, kind="stable").tolist():
        load = heapq.heappop(loads)
        ranks[place] = chosen = load % dp_size
        filled[chosen] += 1
        if filled[chosen] < per_rank:
            heapq.heappush(loads, load + int(costs[place]) * dp_size)
    own = [_samples(ordered[cuts[place] : cuts[place + 1]]) for place in np.flatnonzero(ranks == rank).tolist()]
    return Assignment(ordered, ranks[chunk], rank, own)


def _samples(rows: Ints) -> list[Sample]:
    return [Sample(*row) for row in rows.tolist()]


def _costs(rows: Ints, parts: Ints, count: int, share_prompts: bool) -> Ints:
    """Return the tokens of every one of `count` parts: `parts` [N] says which one a row belongs to, ascending."""
    prompts = rows[:, _PROMPT]
    if share_prompts:
        prompts = prompts * _begins(parts, rows[:, _SLOT])
    return _sums(parts, prompts + rows[:, _RESPONSE] - 1, count)


def _begins(*columns: Ints) -> npt.NDArray[np.bool_]:
    """Return True where one of the columns has another value than in the row before."""
    found = np.ones(len(columns[0]), np.bool_)
    found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found


def _sums(parts: Ints, values: Ints, count: int) -> Ints:
    """Return the sum of the values of each part; sums below 2^53 are exact."""
    return np.bincount(parts, values, count).astype(np.int64)


def _check_budget(ordered: Ints, budget: int) -> None:
    longest = Sample(*ordered[(ordered[:, _PROMPT] + ordered[:, _RESPONSE]).argmax()].tolist())
    need = longest.prompt_len + longest.response_len - 1
    if need > budget:
        raise ValueError(
            f"micro_batch_tokens ({budget}) is below one sample: completion {longest.index} of prompt {longest.slot} "
            f"computes {longest.prompt_len} prompt + {longest.response_len} response - 1 = {need} tokens; give at "
            f"least {need}, or shorten rollout.max_prompt_length or rollout.max_response_length"
        )


def _units(rows: Ints, ranks: Ints, budget: int, share_prompts: bool) -> tuple[Ints, Ints]:
    """Return the unit of every row, and the tokens of every unit; rows are by rank, slot and index.

    A unit goes into a micro-batch as a whole. It is the part of a group that is on one rank, or a part of that where it
    is over the budget. Units are numbered by their first rows.
    """
    answers = rows[:, _RESPONSE] - 1
    if not share_prompts:
        return np.arange(len(rows)), rows[:, _PROMPT] + answers
    begins = _begins(ranks, rows[:, _SLOT])
    group, prompts = np.cumsum(begins) - 1, rows[begins, _PROMPT]
    assert (rows[:, _PROMPT] == prompts[group]).all(), "one group has one prompt"
    over = prompts + _sums(group, answers, len(prompts)) > budget
    split = over[group]
    part = np.zeros(len(rows), np.int64)
    part[split] = best_fit((np.cumsum(over) - 1)[group[split]], answers[split], budget - prompts[over])
    _, first, unit = np.unique(group * (part.max() + 1) + part, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    unit = number[unit]
    return unit, rows[first[order], _PROMPT] + _sums(unit, answers, len(order))


def _deal(ordered: Ints, dp_size: int, budget: int, share_prompts: bool) -> Ints:
    """Return the rank of every sample, of nearly equal cost: longest unit to the lightest rank, then evened out."""
    ranks = np.zeros(len(ordered), np.int64)
    if dp_size == 1:
        return ranks
    unit, costs = _units(ordered, ranks, budget, share_prompts)
    loads, taken = list(range(dp_size)), []  # load * dp_size + rank
    order = np.argsort(-costs, kind="stable")
    for added in (costs[order] * dp_size).tolist():
        lightest = loads[0]
        taken.append(lightest % dp_size)
        heapq.heapreplace(loads, lightest + added)
    of_unit = np.empty(len(order), np.int64)
    of_unit[order] = taken
    ranks = of_unit[unit]
    if share_prompts:  # single samples cannot be dealt much better than longest first
        _even_out(ordered, ranks, dp_size)
    return ranks


Held = dict[int, list[tuple[int, int]]]  # by slot: the samples of one rank, (-tokens, row), the longest first


def _even_out(ordered: Ints, ranks: Ints, dp_size: int) -> None:
    """Move parts of groups from the heaviest to the lightest rank, until added prompts cost more than that gains."""
    order = np.argsort(ranks, kind="stable")
    bounds = np.searchsorted(ranks[order], np.arange(dp_size + 1))
    loads = _costs(ordered[order], ranks[order], dp_size, share_prompts=True)
    known: dict[int, Held] = {}

    def held_by(rank: int) -> Held:
        if rank not in known:
            known[rank] = {}
            for row in order[bounds[rank] : bounds[rank + 1]].tolist():
                slot, _, _, response = ordered[row].tolist()
                known[rank].setdefault(slot, []).append((1 - response, row))
            for members in known[rank].values():
                members.sort()
        return known[rank]

    for _ in range(4 * dp_size):
        heavy, light = int(loads.argmax()), int(loads.argmin())  # the first of several
        mine, theirs = held_by(heavy), held_by(light)
        gain, slot, part = _best_part(mine, theirs, int(loads[heavy] - loads[light]), ordered)
        if gain <= WORTH_MOVING * loads[heavy]:
            return
        prompt, moved = int(ordered[part[0][1], _PROMPT]), -sum(size for size, _ in part)
        loads[light] += moved + (0 if slot in theirs else prompt)
        loads[heavy] -= moved + (prompt if len(part) == len(mine[slot]) else 0)
        chosen = set(part)
        mine[slot] = [member for member in mine[slot] if member not in chosen]
        if not mine[slot]:
            del mine[slot]
        theirs[slot] = sorted([*theirs.get(slot, ()), *part])
        ranks[[row for _, row in part]] = light


def _best_part(mine: Held, theirs: Held, gap: int, ordered: Ints) -> tuple[int, int, list[tuple[int, int]]]:
    """Return by how much the heavier of two ranks gets lighter at most, and the slot and the samples to move."""
    best: tuple[int, int, list[tuple[int, int]]] = (0, -1, [])
    for slot, members in sorted(mine.items()):
        prompt = int(ordered[members[0][1], _PROMPT])
        pays = 0 if slot in theirs else prompt
        wanted = (gap - pays) // 2
        part, moved = [], 0
        for member in members:
            if moved - member[0] <= wanted:
                part.append(member)
                moved -= member[0]
        whole = prompt if len(part) == len(members) else 0
        gain = min(moved + whole, gap - pays - moved)
        if gain > best[0]:
            best = (gain, slot, part)
    return best


def _fill(
    ordered: Ints, ranks: Ints, dp_size: int, rank: int, budget: int, share_prompts: bool, multiple: int
) -> tuple[Ints, list[MicroBatch]]:
    """Return the rank of every sample and the micro-batches of `rank`, as many as those of every other rank.

    Each unit goes where it leaves the least room, or into a new micro-batch.
    """
    order = np.argsort(ranks, kind="stable")
    rows, of_row = ordered[order], ranks[order]
    unit, costs = _units(rows, of_row, budget, share_prompts)
    of_unit = of_row[np.flatnonzero(_begins(np.maximum.accumulate(unit)))]
    batch = best_fit(of_unit, costs, np.full(dp_size, budget))[unit]
    count = -(-int(batch.max() + 1) // multiple) * multiple
    bounds = np.searchsorted(of_row, np.arange(dp_size + 1)).tolist()

    def filled(number: int) -> list[MicroBatch]:
        begin, end = bounds[number], bounds[number + 1]
        found: list[MicroBatch] = [[] for _ in range(int(batch[begin:end].max(initial=-1)) + 1)]
        for place, sample in zip(batch[begin:end].tolist(), _samples(rows[begin:end]), strict=True):
            found[place].append(sample)
        return found

    if min(np.diff(bounds)) >= count:
        own = filled(rank)
        _equalise([own], count, share_prompts)
        return ranks, own
    every = [filled(number) for number in range(dp_size)]  # some give samples to others
    _equalise(every, count, share_prompts)
    homes = {sample: number for number, batches in enumerate(every) for one in batches for sample in one}
    return np.array([homes[sample] for sample in _samples(ordered)], np.int64), every[rank]


def _equalise(packed: list[list[MicroBatch]], count: int, share_prompts: bool) -> None:
    """Give every rank `count` micro-batches, at least as many as any has: the costliest that can be is split first.

    Where a rank has fewer samples than that, it gets one of the rank that has the most, which must be among these.
    """
    held = np.array([sum(map(len, rank)) for rank in packed])
    for number, rank in enumerate(packed):
        while len(rank) < count:
            divisible = [batch for batch in rank if len(batch) > 1]
            if divisible:
                rank.append(_split(max(divisible, key=lambda b: (token_count(b, share_prompts), b)), share_prompts))
                continue
            # Only single samples here: take one from a rank that has more samples than micro-batches to fill.
            donor = int(held.argmax())  # the first of several
            if held[donor] <= count:
                rank.append([])
            else:
                batch = max(packed[donor], key=lambda b: (len(b), b))
                cheapest = min(batch, key=lambda s: (s.response_len, s))
                batch.remove(cheapest)
                rank.append([cheapest])
                held[donor] -= 1
                held[number] += 1


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
