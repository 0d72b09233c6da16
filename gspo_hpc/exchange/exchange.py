"""The exchange of samples: from the ranks that hold groups to those that compute them, and results back.

A micro-batch is computed by one *replica* of the model: the ranks with the same place in data parallelism, which split
it by tensor, pipeline and context parallelism. The first of them, its leader, gets the replica's samples from their
holders and hands them on along a tree. What a pass finds goes from leaders to holders. All ranks derive from the table
of groups and from the packing who sends what, so nothing is asked for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gspo_hpc.data.packing import Assignment
from gspo_hpc.data.records import Completion, Experts, Floats, Group, Prompt
from gspo_hpc.data.table import EXCLUDED, UNGRADED, GroupTable, ShardedGroups, concatenate
from gspo_hpc.exchange import wire_format
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.exchange.wire_format import Item

Key = tuple[int, int]  # slot and index of a completion; index -1: the prompt

_NO_TOKENS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_NOT_HERE = Completion(_NO_TOKENS, _NO_VALUES, "", "", 0)  # in the place of one that this rank does not compute


@dataclass(frozen=True)
class Replicas:
    """The ranks that compute together: the leader of every replica, and this rank's replica, leader first."""

    leaders: tuple[int, ...] = (0,)  # by data-parallel rank
    own: int = 0  # data-parallel rank
    members: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class RolloutView:
    """A view of a rollout for observers on rank 0: its first groups, one completion each, and why graders failed."""

    groups: list[Group]
    failures: Counter[str]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchange samples and results between ranks; by default, in a job of one rank. Methods are collective."""

    transport: Transport = field(default_factory=Transport)
    replicas: Replicas = field(default_factory=Replicas)

    def gather_table(self, own: Iterable[Group]) -> ShardedGroups:
        """Return the groups of all ranks, of which this rank holds `own`."""
        held = {group.slot: group for group in own}
        mine = GroupTable.of(list(held.values()), self.transport.rank)
        whole = self.transport.tree_all_reduce(mine.to_bytes(), _join_tables)
        return ShardedGroups(GroupTable.from_bytes(whole), held)

    def gather_values(self, own: Mapping[int, float]) -> dict[int, float]:
        """Return the values of all ranks by slot, of which this rank gives `own`."""
        mine = json.dumps(list(own.items())).encode()
        whole = self.transport.tree_all_reduce(
            mine, lambda parts: json.dumps([one for part in parts for one in json.loads(part)]).encode()
        )
        return dict(sorted((slot, value) for slot, value in json.loads(whole)))

    def spread(self, own: int) -> tuple[int, int]:
        """Return the largest of a number that every replica has, and their sum. Collective."""
        mine = [own, own if self.replicas.members[0] == self.transport.rank else 0]

        def merge(parts: Sequence[bytes]) -> bytes:
            pairs = [json.loads(part) for part in parts]
            return json.dumps([max(one for one, _ in pairs), sum(one for _, one in pairs)]).encode()

        most, total = json.loads(self.transport.tree_all_reduce(json.dumps(mine).encode(), merge))
        return most, total

    def partition_files(
        self, files: Callable[[], Sequence[str]], read: Callable[[str], Mapping[int, Group]]
    ) -> tuple[dict[int, Group], set[int]]:
        """Return this rank's share of the groups in `files`, by slot, and the slots of all: one rank reads each file.

        Rank 0 alone lists the files. Where a slot is in several, the first of them counts.
        """
        rank, ranks = self.transport.rank, self.transport.world_size
        listed = json.dumps([] if rank else list(files())).encode()
        named = json.loads(self.transport.tree_all_reduce(listed, lambda parts: parts[0]))
        found = {number: read(named[number]) for number in range(rank, len(named), ranks)}
        mine = {str(slot): number for number in sorted(found, reverse=True) for slot in found[number]}
        first = json.loads(self.transport.tree_all_reduce(json.dumps(mine).encode(), _join_least))
        own = {slot: group for number in found for slot, group in found[number].items() if first[str(slot)] == number}
        return own, {int(slot) for slot in first}

    def index_files(
        self,
        listed: Callable[[], Mapping[str, int]],
        written: Mapping[str, int],
        read: Callable[[str, int], Mapping[int, tuple[int, int]]],
    ) -> dict[int, tuple[str, int, int]]:
        """Return by slot the file, offset and bytes of lines in files of all ranks: one rank reads each file.

        Rank 0 alone lists files, with their least sizes; `written` has those of each rank that may not be listed yet.
        Where a slot is in several, the first file by its name counts.
        """
        rank, ranks = self.transport.rank, self.transport.world_size
        known = {**({} if rank else listed()), **written}
        named: dict[str, int] = json.loads(self.transport.tree_all_reduce(json.dumps(known).encode(), _join_largest))
        names = sorted(named)
        mine: dict[str, list[tuple[str, int, int]]] = {}
        for name in names[rank::ranks]:
            for slot, (offset, length) in read(name, named[name]).items():
                mine.setdefault(str(slot), []).append((name, offset, length))
        own = {slot: min(lines) for slot, lines in mine.items()}
        found = json.loads(self.transport.tree_all_reduce(json.dumps(own).encode(), _join_least))
        return {int(slot): (name, offset, length) for slot, (name, offset, length) in found.items()}

    def fetch(
        self, groups: ShardedGroups, assignment: Assignment, *, training: bool, experts: bool
    ) -> dict[int, Group]:
        """Return, by slot, the parts of groups that this rank's replica computes; other completions of them are empty.

        With `training` they have all log-probs, else none; with `experts`, the choices of experts that are known.
        """
        holders, me = groups.table.holders, self.transport.rank
        outgoing = {
            self.replicas.leaders[number]: [
                _packed(groups.own[slot], index, training=training, experts=experts) for slot, index in keys
            ]
            for number, keys in keys_by_replica(assignment, groups.own, prompts=True).items()
        }
        wanted = keys_of_replica(assignment, self.replicas.own, prompts=True)
        local = outgoing.pop(me, [])
        leads = self.replicas.members[0] == me
        counts = Counter(holders[slot] for slot, _ in wanted if holders[slot] != me) if leads else {}
        received = self.transport.exchange(outgoing, counts)
        items = [*local, *(item for rank in sorted(received) for item in received[rank])] if leads else []
        items = self.transport.broadcast(items, len(wanted), self.replicas.members)
        return _unpacked(items, groups.table)

    def return_results(
        self,
        groups: ShardedGroups,
        assignment: Assignment,
        logprobs: Mapping[Key, Floats],
        experts: Mapping[Key, Experts] | None,
    ) -> tuple[dict[Key, Floats], dict[Key, Experts]]:
        """Send a pass's results to the holders; return those of this rank's groups: log-probs, and experts if given.

        What the other ranks of a replica give is ignored: they have the same. Of a prompt that several replicas
        computed, the first replica's experts count.
        """
        holders, me = groups.table.holders, self.transport.rank
        prompts = experts is not None
        outgoing: dict[int, list[Item]] = {}
        if self.replicas.members[0] == me:
            for key in keys_of_replica(assignment, self.replicas.own, prompts=prompts):
                arrays = (logprobs.get(key), None if experts is None else experts[key])
                outgoing.setdefault(holders[key[0]], []).append(Item(*key, arrays))
        counts = {
            leader: len(keys)
            for number, keys in keys_by_replica(assignment, groups.own, prompts=prompts).items()
            if (leader := self.replicas.leaders[number]) != me
        }
        found = {me: outgoing.pop(me, [])} | self.transport.exchange(outgoing, counts)
        values: dict[Key, Floats] = {}
        chosen: dict[Key, Experts] = {}
        for item in (item for rank in sorted(found) for item in found[rank]):
            key = item.slot, item.index
            if item.arrays[0] is not None:
                values[key] = item.arrays[0]
            if item.arrays[1] is not None:
                chosen.setdefault(key, item.arrays[1])
        return values, chosen

    def gather_samples(self, groups: ShardedGroups, count: int) -> RolloutView:
        """Return on rank 0 the first `count` groups, with one completion each, and all failures; nothing elsewhere."""
        holders, me = groups.table.holders, self.transport.rank
        first = groups.table.slots[:count]
        failed = groups.table.rows[groups.table.flagged(UNGRADED)]["slot"].tolist()
        senders = {holders[slot] for slot in (*first, *failed)}
        mine = [_text_item(groups, first)] if me in senders else []
        if me:
            self.transport.exchange({0: mine} if mine else {}, {})
            return RolloutView([], Counter())
        received = self.transport.exchange({}, dict.fromkeys(senders - {0}, 1))
        texts = [item.arrays[0] for items in (mine, *received.values()) for item in items]
        parts = [wire_format.content(text)[0] for text in texts if text is not None]
        shown = [Group.from_json(line) for part in parts for line in part["groups"]]
        failures = sorted((tuple(entry) for part in parts for entry in part["failures"]), key=lambda one: one[:2])
        return RolloutView(sorted(shown, key=lambda group: group.slot), Counter(text for _, _, text in failures))

    def gather_texts(self, groups: ShardedGroups, own: Mapping[int, Any]) -> dict[int, Any]:
        """Return on rank 0 what the holder of each group says of it in JSON, by slot; nothing elsewhere."""
        mine = [Item(slot, -1, (wire_format.text_array(said),)) for slot, said in own.items()]
        if self.transport.rank:
            self.transport.exchange({0: mine} if mine else {}, {})
            return {}
        counts = Counter(holder for holder in groups.table.holders.values() if holder)
        received = self.transport.exchange({}, counts)
        found = {item.slot: item.arrays[0] for items in (mine, *received.values()) for item in items}
        return {slot: wire_format.content(text)[0] for slot, text in sorted(found.items()) if text is not None}


def keys_of_replica(assignment: Assignment, number: int, *, prompts: bool) -> list[Key]:
    """Return the completions that a replica computes and, if asked for, the prompts that they belong to, in order."""
    keys: list[Key] = list(map(tuple, assignment.samples[assignment.ranks == number, :2].tolist()))
    return sorted({*keys, *((slot, -1) for slot, _ in keys)}) if prompts else keys


def keys_by_replica(assignment: Assignment, slots: Collection[int], *, prompts: bool) -> dict[int, list[Key]]:
    """Return what each replica computes of these slots, by replica, ascending; see :func:`keys_of_replica`."""
    held = assignment.only(slots)
    return {int(number): keys_of_replica(held, number, prompts=prompts) for number in np.unique(held.ranks)}


def _join_tables(parts: Sequence[bytes]) -> bytes:
    return concatenate([GroupTable.from_bytes(part) for part in parts]).to_bytes()


def _join_least(parts: Sequence[bytes]) -> bytes:
    """Return the least value of every key."""
    return _joined(parts, min)


def _join_largest(parts: Sequence[bytes]) -> bytes:
    """Return the largest value of every key."""
    return _joined(parts, max)


def _joined(parts: Sequence[bytes], choose: Callable[[Any, Any], Any]) -> bytes:
    joint: dict[str, Any] = {}
    for part in map(json.loads, parts):
        joint |= {key: choose(value, joint.get(key, value)) for key, value in part.items()}
    return json.dumps(joint).encode()


def _packed(group: Group, index: int, *, training: bool, experts: bool) -> Item:
    if index < 0:
        return Item(group.slot, index, (group.prompt.tokens, group.prompt_experts if experts else None))
    c = group.completions[index]
    values = (c.logprobs, c.old_logprobs, c.reference_logprobs, c.selected) if training else ()
    return Item(group.slot, index, (c.tokens, c.experts if experts else None, c.environment, *values))


def _unpacked(items: Sequence[Item], table: GroupTable) -> dict[int, Group]:
    """Return the groups of these items, with advantages as the table has them."""
    keys = np.array([(item.slot, item.index) for item in items if item.index >= 0], np.int64).reshape(-1, 2)
    rows = dict(zip(map(tuple, keys.tolist()), table.rows[table.places(keys)], strict=True))
    found: dict[int, Group] = {}
    for item in sorted(items, key=lambda one: (one.slot, one.index)):  # a prompt before its completions
        arrays = [*item.arrays, *[None] * (wire_format.FIELDS - len(item.arrays))]  # of one that stayed here, fewer
        tokens, experts, environment, logprobs, old, reference, selected = arrays
        assert tokens is not None
        if item.index < 0:
            found[item.slot] = Group(item.slot, Prompt(-1, tokens, "", {}), (), experts)
            continue
        row = rows[item.slot, item.index]
        completion = replace(
            _NOT_HERE,
            tokens=tokens,
            logprobs=np.zeros(row["sampled_len"], np.float32) if logprobs is None else logprobs,
            environment=environment,
            excluded=bool(row["flags"] & EXCLUDED),
            advantage=float(row["advantage"]),
            num_cached_tokens=int(row["num_cached_tokens"]),
            old_logprobs=old,
            reference_logprobs=reference,
            selected=selected,
            experts=experts,
        )
        group = found[item.slot]
        missing = (_NOT_HERE,) * (item.index - len(group.completions))
        found[item.slot] = group.with_completions((*group.completions, *missing, completion))
    return found


def _text_item(groups: ShardedGroups, first: Sequence[int]) -> Item:
    """Return what this rank has to show, as an item of text."""
    shown = [_outline(groups.own[slot]).to_json() for slot in first if slot in groups.own]
    failures = [
        (group.slot, index, completion.failure)
        for group in groups.own.values()
        for index, completion in enumerate(group.completions)
        if completion.failure is not None
    ]
    content: dict[str, Any] = {"groups": shown, "failures": failures}
    return Item(-1, -1, (wire_format.text_array(content),))


def _outline(group: Group) -> Group:
    """Return the group with its first completion alone, and without arrays."""
    first = replace(
        group.completions[0],
        tokens=_NO_TOKENS,
        logprobs=_NO_VALUES,
        old_logprobs=None,
        reference_logprobs=None,
        selected=None,
        experts=None,
        environment=None,
    )
    prompt = replace(group.prompt, tokens=_NO_TOKENS)
    return replace(group, prompt=prompt, completions=(first,), prompt_experts=None)
