"""Weights on their way out of the trainer: parts, which lie in memory as a gather left them, and their fingerprint.

A part is a Hugging Face tensor, or one kind of tensor of many experts at once: a layer of a large mixture has hundreds
of tensors, and what is done for each of them by itself takes longer than their bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ALIGNMENT = 64  # bytes: where parts begin in memory


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

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes [size], aligned. Parts that were made of earlier ones may be overwritten from now on."""


Stream = Callable[[Memory], Iterable[Sequence[Part]]]  # parts in memory of the caller, which it uses as they come


class Scratch:
    """Memory in which parts stay until the next ones come."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def allocate(self, size: int) -> torch.Tensor:
        """See Memory."""
        if self._bytes.numel() < size:
            self._bytes = self._bytes.new_empty(size)
        return self._bytes[:size]


def stream_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Stream:
    """Return the stream of tensors that are copied one by one."""

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for name, tensor in tensors:
            place = memory.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            yield [Part(name, tuple(tensor.shape), place.copy_(tensor.detach()))]

    return stream


class Fingerprint:
    """A short text that says which weights these are, bit for bit, however they were divided among ranks and parts."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []  # of the words of each tensor, modulo 2^64

    def add(self, part: Part) -> None:
        """Take a part into account. Nothing waits for a GPU here."""
        shape = part.shape[1:] if part.experts else part.shape
        self._names += [f"{name}:{shape}:{part.tensor.dtype}:" for name in part.names()]
        words = _words(part.tensor)
        first = 0  # dimension of one tensor's own
        while math.prod(words.shape[:first]) < len(part.experts):
            first += 1
        sums = words.sum(tuple(range(first, words.ndim)), dtype=torch.int64) if words.ndim > first else words
        self._sums.append(sums.reshape(-1).to(torch.int64))

    def text(self) -> str:
        """Return the fingerprint of all parts that were added."""
        values = torch.cat(self._sums).tolist()
        lines = sorted(f"{name}{value}" for name, value in zip(self._names, values, strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers: of eight bytes, where its rows have whole ones, else of its elements.

    Ranks cut rows at whole words too, so the sum does not depend on where they do. Words are summed many times faster,
    and faster than torch's own hash, which sees no change where an even number of equal values change alike.
    """
    try:
        return tensor.view(torch.int64)
    except RuntimeError:
        return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
