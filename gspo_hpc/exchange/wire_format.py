"""The binary format of arrays between two ranks: a header of 64-bit integers, then the arrays, nothing pickled.

An item is a completion (slot, index), or a prompt (slot, -1), with up to FIELDS arrays. Its row in the header has slot,
index, and for each array its kind and shape; receivers know from the table of groups how many rows come. Arrays begin
at multiples of 8 bytes and are not copied where they are received.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Header = npt.NDArray[np.int64]

FIELDS = 7
_KINDS = ("", "<i4", "<f4", "|u1", "<u2")  # by number; 0: the item has no such array
_DIMENSIONS = 3  # at most
_PER_FIELD = 2 + _DIMENSIONS  # kind, number of dimensions, sizes
WIDTH = 2 + FIELDS * _PER_FIELD  # of a header's row
_ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class Item:
    """Up to FIELDS arrays of a completion, or of a prompt at index -1."""

    slot: int
    index: int
    arrays: tuple[Array | None, ...]


def header_of(items: Sequence[Item]) -> Header:
    """Return the header [items, WIDTH]. Raises ValueError for an array of an unsupported type."""
    rows = np.zeros((len(items), WIDTH), np.int64)
    for row, item in zip(rows, items, strict=True):
        row[:2] = item.slot, item.index
        for place, array in enumerate(item.arrays):
            if array is None:
                continue
            begin = 2 + place * _PER_FIELD
            kind = array.dtype.newbyteorder("<").str
            if kind not in _KINDS or array.ndim > _DIMENSIONS:
                raise ValueError(f"arrays of {array.dtype} with {array.ndim} dimensions cannot be sent to other ranks")
            row[begin : begin + 2 + array.ndim] = _KINDS.index(kind), array.ndim, *array.shape
    return rows


def payload_bytes(header: Header) -> int:
    """Return the number of bytes of the arrays that a header describes."""
    return sum(_padded(size) for _, _, size in _arrays(header))


def chunks(items: Sequence[Item], size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the arrays of all items as buffers of `size` bytes, the last one shorter: at most one is held at a time."""
    buffer, filled = np.empty(size, np.uint8), 0
    for item in items:
        for array in item.arrays:
            if array is None:
                continue
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            raw = np.zeros(_padded(little.nbytes), np.uint8) if little.nbytes % _ALIGNMENT else None
            flat = little.reshape(-1).view(np.uint8)
            if raw is not None:
                raw[: little.nbytes] = flat
                flat = raw
            while len(flat):
                taken = flat[: size - filled]
                buffer[filled : filled + len(taken)] = taken
                filled, flat = filled + len(taken), flat[len(taken) :]
                if filled == size:
                    yield buffer
                    buffer, filled = np.empty(size, np.uint8), 0
    if filled:
        yield buffer[:filled]


def unpack(header: Header, payload: npt.NDArray[np.uint8]) -> list[Item]:
    """Return the items of a header; their arrays are views of `payload`."""
    arrays: list[list[Array | None]] = [[None] * FIELDS for _ in header]
    begin = 0
    for row, place, size in _arrays(header):
        kind, dimensions, *shape = header[row, 2 + place * _PER_FIELD : 2 + (place + 1) * _PER_FIELD].tolist()
        array = payload[begin : begin + size].view(_KINDS[kind]).reshape(shape[:dimensions])
        arrays[row][place] = array.astype(array.dtype.newbyteorder("="), copy=False)
        begin += _padded(size)
    return [
        Item(slot, index, tuple(found)) for (slot, index), found in zip(header[:, :2].tolist(), arrays, strict=True)
    ]


def text_array(*content: Any) -> npt.NDArray[np.uint8]:
    """Return what JSON can hold as an array of bytes."""
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def content(array: Array) -> list[Any]:
    """Return what :func:`text_array` was given."""
    found: list[Any] = json.loads(array.tobytes())
    return found


def _arrays(header: Header) -> Iterator[tuple[int, int, int]]:
    """Yield (row, place among the item's arrays, bytes) of every array, in the order of the payload."""
    for number, row in enumerate(header[:, 2:].tolist()):
        for place in range(FIELDS):
            kind, dimensions, *shape = row[place * _PER_FIELD : (place + 1) * _PER_FIELD]
            if kind:
                yield number, place, math.prod(shape[:dimensions]) * np.dtype(_KINDS[kind]).itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
