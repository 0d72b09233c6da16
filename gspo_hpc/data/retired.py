"""Prompts that are no longer sampled ("no positive resampling" of ScaleRL, arXiv 2510.13786), and why.

A prompt is retired for good once a share of the completions of its group, data.no_resampling_pass_rate or more, is
right. It is sampled once an epoch, so this share is that of its newest group. What is retired follows from the groups
of the rollouts before, in the order of their slots, and neither from the clock nor from the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.table import GroupTable


class Retirement(NamedTuple):
    """A prompt that is retired, and the group that decided it."""

    prompt: int  # place in the list of prompts
    rollout: int
    pass_rate: float  # 0 to 1


@dataclass(frozen=True)
class Retired:
    """All prompts that are retired, in the order in which they were.

    `known` has (epoch, number of prompts) for epochs whose order leaves out more of them than the one before: so many
    of the first were known when a rollout first took prompts of it. Those that are retired later are passed over.
    """

    prompts: tuple[Retirement, ...] = ()
    known: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def mask(self, num_prompts: int, first: int | None = None) -> npt.NDArray[np.bool_]:
        """Return [num_prompts] True for retired prompts, by default for all of them, else for the `first` ones."""
        found = np.zeros(num_prompts, np.bool_)
        found[[one.prompt for one in self.prompts[:first]]] = True
        return found

    def left_out(self, epoch: int, begun: int) -> int:
        """Return how many of the first prompts the order of an epoch leaves out.

        `begun` is the newest epoch of which prompts were taken; later ones leave out all that are retired by now.
        """
        if epoch > begun:
            return len(self.prompts)
        return next((number for since, number in reversed(self.known) if since <= epoch), 0)

    def entered(self, epoch: int, begun: int) -> Retired:
        """Return the same prompts where `epoch` is the newest of which prompts are taken, and `begun` was before."""
        if epoch == begun or len(self.prompts) == self.left_out(begun, begun):
            return self
        return replace(self, known=(*self.known, (begun + 1, len(self.prompts))))

    def with_more(self, prompts: Iterable[Retirement]) -> Retired:
        """Return what is retired with these prompts; one that is so already stays as it was."""
        known = {one.prompt for one in self.prompts}
        more = list[Retirement]()
        for one in prompts:
            if one.prompt not in known:
                known.add(one.prompt)
                more.append(one)
        return replace(self, prompts=(*self.prompts, *more)) if more else self

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"prompts": [list(one) for one in self.prompts], "known": [list(one) for one in self.known]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Retired:
        """Return what :meth:`to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        prompts = tuple(Retirement(int(prompt), int(rollout), float(rate)) for prompt, rollout, rate in raw["prompts"])
        return cls(prompts, tuple((int(epoch), int(number)) for epoch, number in raw["known"]))


@dataclass(frozen=True)
class PassRates:
    """The share of right answers in the newest group of each prompt that had one, by place in the list of prompts."""

    rates: Mapping[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rates)

    def with_more(self, rates: Mapping[int, float]) -> PassRates:
        """Return them with those of newer groups."""
        return PassRates({**self.rates, **rates}) if rates else self

    def between(self, begin: int, end: int) -> PassRates:
        """Return those of the prompts from `begin` to before `end`, whose first one has the number 0."""
        if not self.rates:
            return self
        return PassRates({prompt - begin: rate for prompt, rate in self.rates.items() if begin <= prompt < end})

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON."""
        return {"prompts": [*self.rates], "rates": [*self.rates.values()]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> PassRates:
        """Return what :meth:`to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        return cls({int(one): float(rate) for one, rate in zip(raw["prompts"], raw["rates"], strict=True)})


def pass_rates(table: GroupTable, right: Sequence[bool]) -> dict[int, float]:
    """Return by slot the share of a group's completions that are right; `right` [N] is of the rows of the table.

    All completions of the group count, so one that failed to be graded or was cut off is not right.
    """
    slots, places = np.unique(table.rows["slot"], return_inverse=True)
    passed = np.bincount(places, weights=np.asarray(right, np.float64), minlength=len(slots))
    return dict(zip(slots.tolist(), (passed / np.bincount(places, minlength=len(slots))).tolist(), strict=True))


def retirements(
    rates: Mapping[int, float], prompts: Sequence[int], rollout: int, threshold: float | None
) -> list[Retirement]:
    """Return the prompts that a rollout retires: those of its slots whose pass rate is `threshold` or more.

    `prompts` are those that the rollout used up, by slot; groups that were sampled beyond them do not count, nor do
    those that it left unfinished.
    """
    if threshold is None:
        return []
    known = [(slot, prompt) for slot, prompt in enumerate(prompts) if slot in rates]
    return [Retirement(prompt, rollout, rates[slot]) for slot, prompt in known if rates[slot] >= threshold]
