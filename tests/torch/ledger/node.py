"""A node whose GPUs only count what trainers and engines put on them."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator


class CardFull(AssertionError):
    """More was put on a card than it holds."""


class Node:
    """The cards of one node and its own memory, in bytes.

    A trainer keeps what it freed until it empties its cache, as torch does. Host memory is not given back: what is
    page-locked stays so, for the next time. Choices of experts come and go.
    """

    def __init__(self, gpus: int, card: int) -> None:
        self.card = card
        self.peaks: dict[str, int] = defaultdict(int)  # by phase, over all cards: without what trainers keep unused
        self._phases = ["start"] * gpus  # that each card's trainer is in
        self._trainers: list[dict[str, int]] = [{} for _ in range(gpus)]
        self._reserved = [0] * gpus  # by the trainer's allocator
        self._engines: list[dict[str, int]] = [{} for _ in range(gpus)]
        self._host: dict[str, int] = {}
        self._most_host = 0
        self._lock = threading.RLock()  # an array may be freed, and its memory returned, while it is held

    @property
    def host(self) -> int:
        """The bytes of the node's own memory that were taken at the worst moment."""
        with self._lock:
            return self._most_host

    def keep_on_host(self, gpu: int, name: str, size: int) -> None:
        """Take memory of the node for what belongs to a card, unless it has been taken."""
        with self._lock:
            self._host[f"{name} of GPU {gpu}"] = size
            self._most_host = max(self._most_host, sum(self._host.values()))

    def leave_host(self, gpu: int, name: str) -> None:
        """Return memory of the node."""
        with self._lock:
            del self._host[f"{name} of GPU {gpu}"]

    @contextlib.contextmanager
    def phase(self, gpu: int, name: str) -> Iterator[None]:
        """Count what is on a card within the block, from its beginning, as that of a phase."""
        before, self._phases[gpu] = self._phases[gpu], name
        with self._lock:
            self._check(gpu, "what is there")
        yield
        with self._lock:
            self._check(gpu, "what is there")
        self._phases[gpu] = before

    def put(self, gpu: int, name: str, size: int) -> None:
        """Allocate for the trainer, from what it keeps if possible; raise CardFull if the card is too small."""
        with self._lock:
            self._trainers[gpu][name] = size
            wanted = sum(self._trainers[gpu].values())
            self._reserved[gpu] = max(self._reserved[gpu], wanted)
            if self._total(gpu) > self.card:  # torch frees its cache before it gives up
                self._reserved[gpu] = wanted
            self._check(gpu, f"the trainer's {name}")

    def drop(self, gpu: int, name: str) -> None:
        """Free for the trainer, which keeps the memory."""
        with self._lock:
            del self._trainers[gpu][name]

    def empty_cache(self, gpu: int) -> None:
        """Return what the trainer keeps unused."""
        with self._lock:
            self._reserved[gpu] = sum(self._trainers[gpu].values())

    def map(self, gpu: int, name: str, size: int) -> None:
        """Allocate for an engine, which cannot use what the trainer keeps; raise CardFull if the card is too small."""
        with self._lock:
            assert name not in self._engines[gpu], f"{name} of GPU {gpu} is mapped a second time"
            self._engines[gpu][name] = size
            self._check(gpu, f"the engine's {name}")

    def unmap(self, gpu: int, name: str | None = None) -> None:
        """Free for an engine: one thing, or everything."""
        with self._lock:
            for key in [name] if name is not None else list(self._engines[gpu]):
                del self._engines[gpu][key]

    def mapped(self, gpu: int) -> frozenset[str]:
        """Return what an engine has on a card."""
        with self._lock:
            return frozenset(self._engines[gpu])

    def free(self, gpu: int) -> int:
        """Return the bytes of a card that nobody holds."""
        with self._lock:
            return self.card - self._total(gpu)

    def _total(self, gpu: int) -> int:
        return self._reserved[gpu] + sum(self._engines[gpu].values())

    def _check(self, gpu: int, what: str) -> None:
        used = sum(self._trainers[gpu].values()) + sum(self._engines[gpu].values())
        phase = self._phases[gpu]
        self.peaks[phase] = max(self.peaks[phase], used)
        if self._total(gpu) > self.card:
            held = {f"trainer's {k}": v for k, v in self._trainers[gpu].items()}
            held |= {f"engine's {k}": v for k, v in self._engines[gpu].items()}
            listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in held.items())
            raise CardFull(
                f"{phase}: {what} does not fit on GPU {gpu} of {self.card / 2**30:.1f} GiB: {listed}, kept by torch "
                f"{(self._reserved[gpu] - sum(self._trainers[gpu].values())) / 2**30:.1f}"
            )
