"""The order in which prompts of several sources are sampled, resumable to the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import Position, PromptStream, SourcePosition
from gspo_hpc.data.retired import PassRates, Retired
from gspo_hpc.data.sources.mixing import most_of, next_source, too_few, weights_of

_BEGIN = SourcePosition(0, 0, 0, ())
_SOURCE = 2  # tells the words that seed sources from those that order prompts


@dataclass(frozen=True, eq=False)
class MixedStream:
    """An endless order of the prompts of several sources, which follow each other in one list of `num_prompts`.

    Which source a draw is of follows from the draws before it and from the weights; within a source, prompts come as in
    a stream of its own, epoch after epoch. A position counts all draws: `epoch` is how often they make up all prompts,
    and `offset` what is left. A source that has fewer prompts left than a rollout takes of it, because others of it are
    retired, is drawn no longer.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    streams: tuple[PromptStream, ...]
    least: tuple[int, ...]  # prompts that a rollout takes of each source, at most

    @property
    def num_prompts(self) -> int:
        """The prompts of all sources."""
        return sum(stream.num_prompts for stream in self.streams)

    @property
    def begins(self) -> list[int]:
        """The place of each source's first prompt in the list of all."""
        return np.cumsum([0, *(stream.num_prompts for stream in self.streams[:-1])]).tolist()

    def take(self, position: Position, n: int) -> tuple[list[int], Position]:
        """Return the next `n` indices into the list of prompts, and the position behind them.

        Raises ValueError if no source has enough prompts left.
        """
        begun = position.epoch * self.num_prompts + position.offset
        parts = list(position.parts or (_BEGIN,) * len(self.streams))
        if not 0 <= position.offset < self.num_prompts or len(parts) != len(self.streams):
            raise ValueError(
                f"{position} lies outside the data, which has {self.num_prompts} prompts of {len(self.streams)} "
                "sources: has it changed?"
            )
        retired, rates = self._split(position)
        active = [place for place in range(len(parts)) if self._has_enough(place, retired[place])]
        if not active:
            raise ValueError(f"no source of {', '.join(self.names)} has enough prompts that are not retired")
        draws = [part.draws for part in parts]
        order = list[int]()
        for _ in range(n):
            order.append(next_source(draws, self.weights, active))
            draws[order[-1]] += 1
        taken = dict[int, list[int]]()
        for place in active:
            of, begin = parts[place], self.begins[place]
            start = Position(of.epoch, of.offset, replace(retired[place], known=of.known), rates[place])
            found, after = self.streams[place].take(start, draws[place] - of.draws)
            taken[place] = [begin + index for index in reversed(found)]
            parts[place] = SourcePosition(draws[place], after.epoch, after.offset, after.retired.known)
        epoch, offset = divmod(begun + n, self.num_prompts)
        indices = [taken[place].pop() for place in order]
        return indices, replace(position, epoch=epoch, offset=offset, parts=tuple(parts))

    def left(self, retired: Retired) -> int:
        """Return the number of prompts that are not retired, of sources that have enough of them."""
        split, _ = self._split(Position(retired=retired))
        return sum(
            stream.num_prompts - len(of)
            for place, (stream, of) in enumerate(zip(self.streams, split, strict=True))
            if self._has_enough(place, of)
        )

    def epochs(self, position: Position) -> dict[str, float]:
        """Return by source how often its prompts have been gone through, in draws a prompt."""
        parts = position.parts or (_BEGIN,) * len(self.streams)
        return {
            name: part.draws / stream.num_prompts
            for name, part, stream in zip(self.names, parts, self.streams, strict=True)
        }

    def _has_enough(self, place: int, retired: Retired) -> bool:
        return self.streams[place].num_prompts - len(retired) >= self.least[place]

    def _split(self, position: Position) -> tuple[list[Retired], list[PassRates]]:
        """Return what is known of the prompts of each source, whose first one has the number 0."""
        retired, rates = list[Retired](), list[PassRates]()
        for begin, stream in zip(self.begins, self.streams, strict=True):
            end = begin + stream.num_prompts
            own = (one for one in position.retired.prompts if begin <= one.prompt < end)
            retired.append(Retired(tuple(one._replace(prompt=one.prompt - begin) for one in own)))
            rates.append(position.rates.between(begin, end))
        return retired, rates


def of(
    config: Config,
    sizes: Mapping[str, int],
    wanted: int,
    window: Callable[[int], int],
    prior: npt.NDArray[np.float64] | None = None,
) -> PromptStream | MixedStream:
    """Return the order of prompts of data.train, whose size has the name "", or of several sources.

    A rollout takes `wanted` prompts; `window` returns the window of a stream of so many, where they can be as many.
    `prior`: see :class:`PromptStream`. Raises ValueError for a source with fewer prompts than a rollout takes of it.
    """
    data, seed = config.data, config.run.seed
    weights = weights_of(data, sizes)
    streams, least, begin = list[PromptStream](), list[int](), 0
    for place, (name, size) in enumerate(sizes.items()):
        takes = most_of(weights, place, wanted)
        if name and size < takes:
            raise ValueError(f"data.sources: {too_few(name, size, takes)}")
        # The rest of an epoch leaves room for a shuffle.
        places = min(window(size), max(takes, size // 2))
        own = None if prior is None else prior[begin : begin + size]
        order_seed = seed if place == 0 else _seed(seed, place)
        streams.append(PromptStream(size, order_seed, data.shuffle, places, takes, data.curriculum_floor, own))
        least.append(takes)
        begin += size
    return MixedStream(tuple(sizes), tuple(weights), tuple(streams), tuple(least)) if data.sources else streams[0]


def _seed(seed: int, place: int) -> int:
    """Return the seed of the order of a source behind the first: two of one size must not be shuffled alike."""
    return int(np.random.PCG64([seed, place, _SOURCE]).random_raw())
