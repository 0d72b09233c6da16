"""Prompts on their way from rank 0 to the engines, through the store of the job.

Engines take prompts as they become free, so nobody knows beforehand which rank generates a prompt. Rank 0 therefore
puts all prompts of a call of generation into the store, and a rank fetches those that it has taken, which nobody else
does: its bytes are those of its own prompts, however many ranks there are.

A prompt travels in the format of :mod:`gspo_hpc.exchange.wire_format`, header and arrays, cut into pieces: the store
takes at most 8 MiB for a key, and a row of data with test cases can be longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from gspo_hpc.data.records import Prompt
from gspo_hpc.exchange import wire_format
from gspo_hpc.exchange.wire_format import WIDTH, Item

# Of a prompt under one key, and of the prompts that are put at once: as much as the store reads at once. Of a longer
# message it reads the beginning again with everything that comes, which doubles rank 0's time.
PIECE_BYTES = 1 << 16
_HEADER_BYTES = 8 * WIDTH


class SharedPrompts:
    """The prompts of one call of generation, in the store of the job, at keys that begin with `name`."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name

    def publish(self, prompts: Mapping[int, Prompt]) -> None:
        """Put prompts there, by slot, and return when the store has them. Rank 0 alone calls it."""
        store: Any = self._store  # torch's type stubs lack multi_set (2.13)
        keys: list[str] = []
        values: list[bytes] = []
        size = 0
        for slot, prompt in prompts.items():
            for number, piece in enumerate(_pieces(prompt)):
                keys.append(self._key(slot, number))
                values.append(piece)
                size += len(piece)
                if size >= PIECE_BYTES:
                    store.multi_set(keys, values)
                    keys, values, size = [], [], 0
        if keys:
            store.multi_set(keys, values)
        # The store takes values without an answer. Until it has read a whole message it may take its first values once
        # more, after others have fetched and removed them. What it answers now comes after all of them.
        store.num_keys()

    def fetch(self, slots: Sequence[int]) -> list[Prompt]:
        """Return the prompts of some slots, and remove them from the store. Each slot is fetched once."""
        if not slots:
            return []
        found = {slot: [piece] for slot, piece in zip(slots, self._get((slot, 0) for slot in slots), strict=True)}
        more = [(slot, number) for slot in slots for number in range(1, _count(found[slot][0]))]
        if more:
            for (slot, _), piece in zip(more, self._get(more), strict=True):
                found[slot].append(piece)
        for slot, pieces in found.items():
            for number in range(len(pieces)):
                self._store.delete_key(self._key(slot, number))
        return [_prompt(found.pop(slot)) for slot in slots]

    def _get(self, pieces: Iterable[tuple[int, int]]) -> list[bytes]:
        return self._store.multi_get([self._key(slot, number) for slot, number in pieces])

    def _key(self, slot: int, number: int) -> str:
        return f"{self._name}/prompt/{slot}/{number}"


def _pieces(prompt: Prompt) -> list[bytes]:
    """Return the header and the arrays of a prompt, in pieces of PIECE_BYTES; the last is shorter."""
    item = Item(prompt.index, -1, (prompt.tokens, wire_format.text_array(prompt.text, prompt.fields)))
    chunks = wire_format.chunks([item], PIECE_BYTES)
    whole = b"".join([wire_format.header_of([item]).tobytes(), *(chunk.tobytes() for chunk in chunks)])
    return [whole[begin : begin + PIECE_BYTES] for begin in range(0, len(whole), PIECE_BYTES)]


def _count(first: bytes) -> int:
    """Return the number of pieces of a prompt, which its first piece tells."""
    header = np.frombuffer(first, np.int64, WIDTH).reshape(1, WIDTH)
    return -(-(_HEADER_BYTES + wire_format.payload_bytes(header)) // PIECE_BYTES)


def _prompt(pieces: Sequence[bytes]) -> Prompt:
    whole = np.frombuffer(bytearray(b"".join(pieces)), np.uint8)
    header = whole[:_HEADER_BYTES].view(np.int64).reshape(1, WIDTH)
    (item,) = wire_format.unpack(header, whole[_HEADER_BYTES:])
    tokens, text, *_ = item.arrays
    assert tokens is not None and text is not None
    return Prompt(item.slot, tokens, *wire_format.content(text))
