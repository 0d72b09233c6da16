"""Mixing of sources by their weights: which source each draw is of. No numpy, for commands that answer at once.

Draw number i of a source, counted from 0, has the time (i + 1/2) / weight, and draws come in the order of their times,
those of the same time in the order of the sources. So after any number of draws every source has had its share, to
within one draw for each source, and what comes next follows from the numbers of draws so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gspo_hpc.config.schema import Data


def next_source(draws: Sequence[int], weights: Sequence[float], active: Collection[int]) -> int:
    """Return the source, one of `active`, of which the next draw is, after so many draws of each."""
    return min(active, key=lambda place: ((draws[place] + 0.5) / weights[place], place))


def draws_after(weights: Sequence[float], count: int) -> list[int]:
    """Return how many of the first `count` draws are of each source."""
    # Whatever has a time below this one is among them, since that is at most count - len(weights) / 2 draws.
    time = (count - len(weights)) / math.fsum(weights)
    draws = [max(0, math.ceil(time * weight - 0.5)) for weight in weights]
    for place, weight in enumerate(weights):  # where the product was rounded the other way
        while draws[place] and (draws[place] - 0.5) / weight >= time:
            draws[place] -= 1
    every = range(len(weights))
    for _ in range(count - sum(draws)):
        draws[next_source(draws, weights, every)] += 1
    return draws


def most_of(weights: Sequence[float], place: int, count: int) -> int:
    """Return the most draws of a source that any `count` draws in a row can have.

    Between the first and the last of n draws of it lie n - 1 of its steps, in which every other source has at least
    the whole number of its own steps that fit.
    """
    others = [weight / weights[place] for number, weight in enumerate(weights) if number != place]
    most = 1
    while most < count and most + 1 + sum(math.floor(most * other) for other in others) <= count:
        most += 1
    return most


def weights_of(data: Data, sizes: Mapping[str, int]) -> list[float]:
    """Return the weights of the sources, in their order: those that are given, else their sizes."""
    if not data.sources:
        return [1.0]
    return [float(sizes[one.name] if one.weight is None else one.weight) for one in data.sources]


def too_few(name: str, size: int, takes: int) -> str:
    """Return why a source is too small."""
    return (
        f"source {name} has {size} prompts, but a rollout takes up to {takes} different ones of it: give it more "
        "prompts or a lower weight, or make the rollout smaller"
    )
