"""The table of a rollout's groups, which every rank has: lengths, rewards, advantages, and which rank holds each group.

That is about 70 bytes a completion. Tokens, log-probs, texts and choices of experts stay on the rank that generated or
read the group, its *holder*; from the table alone all ranks decide alike who trains which completion.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.outcomes import CALL_OUTCOMES, OUTCOMES
from gspo_hpc.data.records import OUT_OF_TIME, Completion, Group
from gspo_hpc.data.sources.selection import FIELD

EXCLUDED, UNGRADED, TRUNCATED, LATE = 1, 2, 4, 8  # bits of a row's flags
_OF_SAMPLES = ("slot", "index", "prompt_len", "response_len")  # fields of gspo_hpc.data.packing.Sample
_MOST_CALLS = 65535  # that a row can count
# The pool refuses other outcomes; a journal that an earlier version wrote may hold some, and they end no run.
_OUTCOME_NUMBERS = {name: 1 + place for place, name in enumerate(OUTCOMES)}

ROW = np.dtype(
    [
        ("slot", "<i4"),
        ("index", "<i4"),
        ("holder", "<i4"),  # rank
        ("prompt_len", "<i4"),
        ("response_len", "<i4"),
        ("sampled_len", "<i4"),  # those of the response that the model sampled; the others are an environment's
        ("turns", "<i4"),  # messages of the model in a conversation, 1 without one
        ("crc32", "<u4"),  # of the response's tokens
        ("reward", "<f8"),
        ("advantage", "<f8"),
        ("num_cached_tokens", "<i4"),  # tokens of the prompt that the engine took from its prefix cache
        ("flags", "<u1"),
        ("calls", "<u2", len(CALL_OUTCOMES)),  # of tools, by what came of them
        ("source", "<u4"),  # of the prompt, see source_mark
    ]
)


@dataclass(frozen=True, eq=False)
class GroupTable:
    """One row a completion, by slot and index; `reward_parts` are rewards by grader, NaN where `graded` is False."""

    rows: npt.NDArray[np.void]  # [N] of ROW
    names: tuple[str, ...]  # P graders, sorted
    reward_parts: npt.NDArray[np.float64]  # [N, P]
    graded: npt.NDArray[np.bool_]  # [N, P]
    outcomes: npt.NDArray[np.uint8]  # [N, P], 1 + place in OUTCOMES, 0 where none is known

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def slots(self) -> list[int]:
        """The slots of the groups, ascending."""
        found: list[int] = self._firsts["slot"].tolist()
        return found

    @property
    def holders(self) -> dict[int, int]:
        """The rank that holds each group, by slot."""
        return dict(zip(self.slots, self._firsts["holder"].tolist(), strict=True))

    @property
    def _firsts(self) -> npt.NDArray[np.void]:
        """The first row of each group."""
        slots = self.rows["slot"]
        return self.rows[np.append(True, slots[1:] != slots[:-1])[: len(slots)]]

    def places(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of each of `keys` [N, 2], slot and index of completions that the table has."""
        slots, indices = self.rows["slot"].astype(np.int64), self.rows["index"].astype(np.int64)
        found = np.searchsorted(slots << 32 | indices, keys[:, 0] << 32 | keys[:, 1])
        assert (slots[found] == keys[:, 0]).all() and (indices[found] == keys[:, 1]).all(), "a key has no row"
        return found

    def flagged(self, flag: int) -> npt.NDArray[np.bool_]:
        """Return True for every row that has the flag."""
        found: npt.NDArray[np.bool_] = (self.rows["flags"] & flag) != 0
        return found

    def select(self, mask: npt.NDArray[np.bool_]) -> GroupTable:
        """Return the rows for which `mask` is True."""
        return GroupTable(self.rows[mask], self.names, self.reward_parts[mask], self.graded[mask], self.outcomes[mask])

    def samples(self) -> npt.NDArray[np.int64]:
        """Return every completion that has tokens, for packing: [N, 4], the fields of a Sample."""
        rows = self.rows[self.rows["response_len"] > 0]
        return np.stack([rows[name].astype(np.int64) for name in _OF_SAMPLES], axis=1)

    def tokens_crc32(self) -> int:
        """Return the CRC-32 of the tokens of all completions, one after the other."""
        return _joined_crc32(self.rows["crc32"], self.rows["response_len"].astype(np.int64) * 4)

    def to_bytes(self) -> bytes:
        """Return the table as bytes: a line of JSON, then the rows, and by grader rewards and outcomes."""
        head = json.dumps({"rows": len(self), "names": self.names}).encode() + b"\n"
        by_grader = (self.reward_parts.astype("<f8"), self.graded, self.outcomes)
        return b"".join((head, self.rows.tobytes(), *(array.tobytes() for array in by_grader)))

    @classmethod
    def from_bytes(cls, raw: bytes) -> GroupTable:
        """Return the table that :meth:`to_bytes` wrote."""
        end = raw.index(b"\n") + 1
        head = json.loads(raw[:end])
        count, names = int(head["rows"]), tuple(head["names"])
        width = (count, len(names))
        parts_at = end + count * ROW.itemsize
        graded_at = parts_at + 8 * count * len(names)
        return cls(
            np.frombuffer(raw, ROW, count, end),
            names,
            np.frombuffer(raw, "<f8", count * len(names), parts_at).astype(np.float64).reshape(width),
            np.frombuffer(raw, np.bool_, count * len(names), graded_at).reshape(width),
            np.frombuffer(raw, np.uint8, count * len(names), graded_at + count * len(names)).reshape(width),
        )

    @classmethod
    def of(cls, groups: Sequence[Group], holder: int) -> GroupTable:
        """Return the table of groups that rank `holder` holds."""
        names = tuple(
            sorted({n for group in groups for c in group.completions for n in (*c.reward_parts, *c.outcomes)})
        )
        rows = [
            (
                group.slot,
                index,
                holder,
                len(group.prompt.tokens),
                len(c.tokens),
                len(c.sampled),
                c.turns,
                zlib.crc32(c.tokens.astype("<i4").tobytes()),
                c.reward,
                c.advantage,
                c.num_cached_tokens,
                _flags(c),
                tuple(min(c.calls.get(one, 0), _MOST_CALLS) for one in CALL_OUTCOMES),
                source_mark(str(group.prompt.fields.get(FIELD, ""))),
            )
            for group in groups
            for index, c in enumerate(group.completions)
        ]
        told = [c.outcomes for group in groups for c in group.completions]
        every = [c.reward_parts for group in groups for c in group.completions]
        width = (len(rows), len(names))
        parts = [[c.get(name, np.nan) for name in names] for c in every]
        graded = [[name in c for name in names] for c in every]
        outcomes = [[_OUTCOME_NUMBERS.get(c[name], 0) if name in c else 0 for name in names] for c in told]
        return cls(
            np.array(rows, ROW).reshape(len(rows)),
            names,
            np.array(parts, np.float64).reshape(width),
            np.array(graded, np.bool_).reshape(width),
            np.array(outcomes, np.uint8).reshape(width),
        ).sorted()

    def sorted(self) -> GroupTable:
        """Return the same rows by slot and index."""
        order = np.lexsort((self.rows["index"], self.rows["slot"]))
        return GroupTable(
            self.rows[order], self.names, self.reward_parts[order], self.graded[order], self.outcomes[order]
        )


def source_mark(name: str) -> int:
    """Return the number under which a row has its source: the CRC-32 of the name, 0 without one."""
    return zlib.crc32(name.encode("utf-8", "backslashreplace"))


def concatenate(tables: Sequence[GroupTable]) -> GroupTable:
    """Return the rows of all tables in one, by slot and index."""
    names = tuple(sorted({name for table in tables for name in table.names}))
    count = sum(map(len, tables))
    parts, graded = np.full((count, len(names)), np.nan), np.zeros((count, len(names)), np.bool_)
    outcomes = np.zeros((count, len(names)), np.uint8)
    begin = 0
    for table in tables:
        end = begin + len(table)
        for column, name in enumerate(table.names):
            parts[begin:end, names.index(name)] = table.reward_parts[:, column]
            graded[begin:end, names.index(name)] = table.graded[:, column]
            outcomes[begin:end, names.index(name)] = table.outcomes[:, column]
        begin = end
    rows = np.concatenate([table.rows for table in tables]) if tables else np.zeros(0, ROW)
    return GroupTable(rows, names, parts, graded, outcomes).sorted()


@dataclass(frozen=True, eq=False)
class ShardedGroups:
    """The groups of a rollout, each on the rank that holds it. The table is the same on every rank."""

    table: GroupTable
    own: Mapping[int, Group] = field(default_factory=dict)  # by slot: those that this rank holds

    def at(self, slots: Sequence[int]) -> ShardedGroups:
        """Return the groups of these slots alone."""
        wanted = set(slots)
        own = {slot: group for slot, group in self.own.items() if slot in wanted}
        return ShardedGroups(self.table.select(np.isin(self.table.rows["slot"], list(wanted))), own)

    def with_own(self, groups: Mapping[int, Group]) -> ShardedGroups:
        """Return the same table with new content of this rank's groups, in fields that the table lacks."""
        return replace(self, own=groups)


_POLYNOMIAL, _ONE = np.uint32(0xEDB88320), np.uint32(1 << 31)  # of CRC-32, the lowest power in the highest bit


def _flags(completion: Completion) -> int:
    ended = {"length": TRUNCATED, OUT_OF_TIME: LATE}.get(completion.finish_reason, 0)
    return EXCLUDED * completion.excluded + UNGRADED * (completion.failure is not None) + ended


def _joined_crc32(crcs: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]) -> int:
    """Return the CRC-32 of texts in a row from the CRC-32 and the number of bytes of each.

    CRCs are remainders of polynomials over two elements: the first of two texts is multiplied by x to the number of
    bits of the second. Neighbours are joined until one is left.
    """
    sizes, which = np.unique(lengths, return_inverse=True)
    powers = _powers(8 * sizes)[which]
    while len(crcs) > 1:
        if len(crcs) % 2:  # an empty text
            crcs, powers = np.append(crcs, np.uint32(0)), np.append(powers, _ONE)
        crcs, powers = _product(crcs[::2], powers[1::2]) ^ crcs[1::2], _product(powers[::2], powers[1::2])
    return int(crcs[0]) if len(crcs) else 0


def _powers(exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return x to each exponent."""
    result, square = np.full(len(exponents), _ONE), np.array([_ONE >> np.uint32(1)])
    while exponents.any():
        result = np.where(exponents & 1, _product(result, square), result)
        square, exponents = _product(square, square), exponents >> 1
    return result


def _product(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a times b, modulo the polynomial of CRC-32."""
    result, b = np.zeros_like(a), np.broadcast_to(b, a.shape)
    for bit in range(31, -1, -1):
        result ^= np.where((a >> np.uint32(bit)) & 1, b, 0).astype(np.uint32)
        b = (b >> np.uint32(1)) ^ np.where(b & 1, _POLYNOMIAL, np.uint32(0))
    return result
