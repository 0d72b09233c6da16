"""Weights on their way out of the trainer: parts, which lie in memory as a gather left them, and their fingerprint.

A part is a Hugging Face tensor, or one kind of tensor of many experts at once: a layer of a large mixture has hundreds
of tensors, and what is done for each of them by itself takes longer than their bytes.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ALIGNMENT = 64  # bytes: where parts begin in memory
_SMALL = 1024  # words of a matrix whose words are mixed one by one
_CACHED = 1 << 17  # words that a processor's cache holds


@dataclass(frozen=True)
class Part:
    """A tensor, or the tensors of several experts of a layer, [experts, ...].

    `tensor` is a view whose elements, in order, are those of `shape`: a worker that copies it needs no copy before.
    """

    name: str  # with {} in place of the number where there are experts
    shape: tuple[int, ...]
    tensor: torch.Tensor
    experts: tuple[int, ...] = ()

    def names(self) -> list[str]:
        """Return the Hugging Face names of its tensors."""
        return [self.name.format(expert) for expert in self.experts] if self.experts else [self.name]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each Hugging Face tensor with its name; they may be views."""
        whole = self.tensor.reshape(self.shape)
        yield from zip(self.names(), whole.unbind() if self.experts else (whole,), strict=True)


class Memory(Protocol):
    """Memory that parts are put into, one after the other."""

    def reserve(self, largest: int) -> None:
        """Take note that no later call of :meth:`allocate` asks for more bytes, so that this need not grow."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes [size], aligned. Parts that were made of earlier ones may be overwritten from now on."""


Stream = Callable[[Memory], Iterable[Sequence[Part]]]  # parts in memory of the caller, which it uses as they come


class Scratch:
    """Memory in which parts stay until the next ones come."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, largest: int) -> None:
        """See Memory."""
        self.allocate(largest)

    def allocate(self, size: int) -> torch.Tensor:
        """See Memory."""
        if self._bytes.numel() < size:
            self._bytes = self._bytes.new_empty(size)
        return self._bytes[:size]


def stream_of(tensors: Iterable[tuple[str, torch.Tensor]], largest: int = 0) -> Stream:
    """Return the stream of tensors that are copied one by one; the largest has `largest` bytes, if that is known."""

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        known = (tensor.nbytes for _, tensor in tensors) if isinstance(tensors, Collection) else ()
        memory.reserve(max(known, default=largest))
        for name, tensor in tensors:
            place = memory.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            parts = [Part(name, tuple(tensor.shape), place.copy_(tensor.detach()))]
            del place  # else it would keep this memory, if it has to be freed for a larger tensor
            yield parts
            del parts

    return stream


class Fingerprint:
    """A short text that says which weights these are, bit for bit, however they were divided among ranks and parts.

    Of each matrix the 64-bit words of every row and of every column are summed, and these sums are mixed with their
    place, as are the words of vectors and of small matrices: two words that change places change two rows or two
    columns. Only what keeps the sums of all rows and all columns is not seen. `size` ranks, to all of which the same
    parts are added, share the work: then the sums of their :meth:`values` are given to :meth:`text`.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank = rank
        self._loads = [(0, one) for one in range(size)]  # a heap: bytes that each rank has hashed
        self._names: list[str] = []
        self._new = torch.empty(0, dtype=torch.int64)  # where tensors are
        self._sums: list[torch.Tensor | int] = []  # one of each tensor, or their number: another rank hashes them

    def add(self, part: Part) -> None:
        """Take a part into account. Nothing waits for a GPU here."""
        shape = part.shape[1:] if part.experts else part.shape
        self._names += [f"{name}:{shape}:{part.tensor.dtype}:" for name in part.names()]
        self._new = self._new.to(part.tensor.device)
        load, rank = self._loads[0]
        heapq.heapreplace(self._loads, (load + part.tensor.nbytes, rank))
        self._sums.append(_hashes(part, shape) if rank == self._rank else len(part.names()))

    def values(self) -> torch.Tensor:
        """Return a number of each tensor (int64), where the tensors are, or 0 where another rank has it."""
        found = [self._new.new_zeros(one) if isinstance(one, int) else one for one in self._sums]
        return torch.cat([self._new, *found])

    def text(self, values: torch.Tensor) -> str:
        """Return the fingerprint of all parts that were added, from the values of all ranks together."""
        lines = sorted(f"{name}{value}" for name, value in zip(self._names, values.tolist(), strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _hashes(part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an int64 for each tensor of the part, all of `shape`; they depend on nothing but its elements."""
    words = _words(part.tensor, shape)
    width = (shape[-1] if shape else 1) * part.tensor.itemsize // words.itemsize
    tensors, height = max(1, len(part.experts)), math.prod(shape[:-1])
    lead, rows = _dimensions(words, tensors), _dimensions(words, tensors * height)
    if height == 1 or height * width <= _SMALL or lead is None or rows is None:
        words = words.reshape(tensors, height, width)
        lead, rows = 1, 2
    if height == 1 or height * width <= _SMALL:
        return _mixed(words.flatten(1).to(torch.int64))
    over_rows, over_columns = _margins(words, lead, rows)
    return _mixed(torch.cat([over_columns.view(tensors, height), over_rows.view(tensors, width)], 1))


def _words(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a part's bits as integers: of eight bytes where a row of `shape` has whole ones, else of its elements.

    Words are summed many times faster, and faster than torch's own hash, which sees no change where an even number of
    equal values change alike.
    """
    if not shape or shape[-1] * tensor.itemsize % 8:
        return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    try:
        return tensor.view(torch.int64)
    except RuntimeError:  # the last dimension is not contiguous, or a rank's part of a row has no whole words
        return tensor.reshape(-1, *shape).contiguous().view(torch.int64)


def _dimensions(words: torch.Tensor, count: int) -> int | None:
    """Return how many leading dimensions have `count` indices together; None where a dimension is cut in two."""
    products = itertools.accumulate(words.shape[:-1], int.__mul__, initial=1)
    return next((number for number, product in enumerate(products) if product == count), None)


def _margins(words: torch.Tensor, lead: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over rows [..., columns] and over columns [..., rows] of matrices of words, modulo 2^64.

    The first `lead` dimensions are those of matrices, those up to `rows` of rows, and the others of columns. On CPUs
    this goes piece by piece, so that words are in the processor's cache when they are summed the second time.
    """
    if words.is_cuda or words.numel() <= _CACHED or not rows:
        over_columns = _sum(words, range(rows, words.ndim))  # first: it reads what is not in the cache faster
        return _sum(words, range(lead, rows)), over_columns
    if words.shape[0] == 1:
        return _margins(words[0], max(0, lead - 1), rows - 1)
    step = max(1, _CACHED // (words.numel() // words.shape[0]))
    pieces = [_margins(piece, lead, rows) for piece in words.split(step)]
    over_rows = [one.reshape(-1) for one, _ in pieces]
    whole = torch.cat(over_rows) if lead else functools.reduce(torch.add, over_rows)
    return whole, torch.cat([one.reshape(-1) for _, one in pieces])


def _sum(words: torch.Tensor, dimensions: range) -> torch.Tensor:
    return words.sum(tuple(dimensions), dtype=torch.int64) if dimensions else words.to(torch.int64)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Return the sums [n] of values [n, m], int64, each mixed with its place in its row before (as in splitmix64)."""
    mixed = torch.arange(1, values.shape[1] + 1, device=values.device).mul_(-0x61C8864680B583EB).add(values)
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        mixed = mixed.bitwise_xor_(mixed >> bits).mul_(factor)
    return mixed.sum(1)
