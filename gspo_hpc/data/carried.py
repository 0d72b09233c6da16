"""Groups that a rollout hands on to the next one, because enough others were finished (partial rollouts).

They come first among the slots of the next rollout, the oldest of them at the front. A checkpoint has this list; what
was sampled of the groups is in the journals of the rollouts that ended without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_hpc.system.text import shortened

_FILE = re.compile(r"rank-\d+\.(spare|unfinished)")  # the file may be of another's making


def count(value: Any) -> int:
    """Return a whole number from 0; ValueError for anything else, of which a negative one would name another prompt."""
    if type(value) is not int or value < 0:
        raise ValueError(f"this is no number from 0: {shortened(repr(value), 80)}")
    return value


class Place(NamedTuple):
    """The place of a group in the run directory: a line of a file of a rollout's journals."""

    rollout: int
    fingerprint: str  # of the weights that sampled last
    file: str
    offset: int  # bytes
    length: int

    @classmethod
    def from_list(cls, raw: Sequence[Any]) -> Place:
        """Return the place that a list of plain values names. Raises ValueError or TypeError for anything else."""
        rollout, fingerprint, file, offset, length = raw
        if not _FILE.fullmatch(file):
            raise ValueError(f"this is not a file of groups that a rollout hands on: {shortened(repr(file), 80)}")
        return cls(count(rollout), str(fingerprint), str(file), count(offset), count(length))


class Carried(NamedTuple):
    """A group that was begun in an earlier rollout and is not trained on yet."""

    prompt: int  # place in the list of prompts
    began: int  # the rollout that drew it
    finished: bool = False  # it is sampled and graded
    place: Place | None = None  # of what was sampled; None: nothing was

    @classmethod
    def from_list(cls, raw: Sequence[Any]) -> Carried:
        """Return what a list of plain values says. Raises ValueError or TypeError for anything else."""
        prompt, began, finished, place = raw
        where = None if place is None else Place.from_list(place)
        return cls(count(prompt), count(began), bool(finished), where)


@dataclass(frozen=True)
class Enough:
    """The groups with which a rollout ends, whatever else is unfinished."""

    groups: int  # so many more
    required: frozenset[int] = frozenset()  # slots that have to be among those that are finished
    signal: bool = False  # only groups from which there is something to learn count

    def to_values(self) -> dict[str, Any]:
        """Return plain values."""
        return {"groups": self.groups, "required": sorted(self.required), "signal": self.signal}

    @classmethod
    def from_values(cls, raw: Mapping[str, Any] | None) -> Enough | None:
        """Return what :meth:`to_values` gave, or None."""
        return None if raw is None else cls(raw["groups"], frozenset(raw["required"]), raw["signal"])


def handed_on(
    slots: Mapping[int, Carried], places: Mapping[int, tuple[Place, bool]], used: frozenset[int]
) -> tuple[Carried, ...]:
    """Return what a rollout hands on of its `slots`: the groups that are not `used`, in their order.

    `places` has those of which something was sampled, with whether they are finished. Others stay as they were.
    """
    found = []
    for slot, one in sorted(slots.items()):
        if slot in used:
            continue
        place, finished = places.get(slot, (one.place, one.finished))
        found.append(one._replace(place=place, finished=finished))
    return tuple(found)
