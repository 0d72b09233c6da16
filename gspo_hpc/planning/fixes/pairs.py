"""Fixes of two settings: pairs of changes of which neither is enough alone.

The nearest pairs come first, of which one change leaves fewer rules broken and the other is far enough to mend the
rest; then a few values of each setting are tried with a few of each other one, so that fixes of every kind are found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.fixes.candidates import candidates
from gspo_hpc.planning.fixes.change import FEW, Change, Fix, Setting, nearest, setting_of, together
from gspo_hpc.planning.fixes.faults import left_of, topics_of
from gspo_hpc.planning.mentions import mentioned
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.settings import ENGINE, with_value

if TYPE_CHECKING:
    from gspo_hpc.planning.fixes.search import Search

ROOM = 1800  # pairs that are looked at: a few values of each setting with a few of each other one ...
_ROOM_OF_NEAREST = 600  # ... and before that, in the order of their distances
_WITH_BETTER = 24  # values of a setting that are tried with another that leaves fewer rules broken
_MEMORY_COST = 4  # pairs that take as long as one estimate of memory
_WEIGHTLESS = ("batch.steps_per_generation", "batch.generation_batch_size", "batch.num_generations")  # no memory in it
# Settings that have no part in rules of batch sizes and ranks.
_UNCOUNTED = ("memory.", ENGINE, "optimizer.", "model.", "moe.", "algorithm.", "cluster.gpu", "rollout.max_")
_OF_ENGINES = ("rollout.tensor_parallel_size", "rollout.engines_per_node")

_Pair = tuple[Change, Config, Change]  # the first change, the config after it, and the second


class Pairs:
    """The pairs of changes that fix one plan. To be made after the singles of `search` are found."""

    def __init__(self, search: Search, *, machines: bool = True) -> None:
        """Begin with what singles left; `machines` says whether a change may be of other machines."""
        self.search, self.machines = search, machines
        named = {key for item in search.broken for key in mentioned(item.message)}
        # What leaves fewer rules broken comes first: its other half is nearest. Then what broken rules speak of: two
        # lengths make one sum, and there may be more settings beside than there is room for.
        self.firsts = sorted(
            (first for first in search.firsts if machines or not distances.is_of_machines(first[0].key)),
            key=lambda first: (left_of(first[2].broken) >= search.left, first[0].key not in named, first[0].distance),
        )
        self.known: dict[frozenset[Setting], Fix | None] = {}

    def find(self, room: int = ROOM, alone: Collection[Setting] = (), farthest: float = math.inf) -> list[Fix]:
        """Return the changes of two settings that fix the plan, nearest first, without those that do so `alone`.

        About `room` pairs are looked at, after as many of the nearest but at most a few hundred, and none that is
        farther than `farthest`.
        """
        within, rest = farthest, min(room, _ROOM_OF_NEAREST)
        for pair in self._nearest(alone) if rest > 0 else ():
            if rest <= 0 or _distance(pair) > within:
                break
            rest -= self._look_at(pair)
            if fix := self.known[_settings(pair)]:
                within = min(within, fix.distance)
        for pair in self._of_every_kind(alone):
            if room <= 0:
                break
            if _distance(pair) <= farthest:
                room -= self._look_at(pair)
        return sorted((fix for fix in self.known.values() if fix is not None), key=self.search.order)

    def _look_at(self, pair: _Pair) -> int:
        """Note whether a pair is a fix, and return what that took: nothing for one that is known."""
        if (both := _settings(pair)) in self.known:
            return 0
        first, changed, second = pair
        plan = self.search.judge(with_value(changed, second.key, second.value))
        self.known[both] = self.search.fix(plan, *sorted((first, second), key=lambda one: one.distance))
        return 1 + _MEMORY_COST * (plan is not None and plan.memory is not None)

    def _nearest(self, alone: Collection[Setting]) -> list[_Pair]:
        """Return pairs by their distance, of which the first change leaves fewer rules broken.

        The second one is at least as far as the nearest change that mends each of those that are left.
        """
        least = self._least()
        found = list[_Pair]()
        for first, changed, plan in self.firsts:
            if left_of(plan.broken) < self.search.left:
                enough = max((least.get(item.rule, 0.0) for item in plan.broken), default=0.0)
                for key, values in self._seconds(first, changed, plan):
                    seconds = (one for one in nearest(changed, key, values, _WITH_BETTER) if one.distance >= enough)
                    found += [(first, changed, second) for second in seconds if setting_of(second) not in alone]
        return sorted(found, key=_distance)

    def _least(self) -> dict[RuleId, float]:
        """Return the distance of the nearest change that mends a rule, for those that some change mends."""
        rules = {item.rule for item in self.search.broken}
        found: dict[RuleId, float] = {}
        for change, _, plan in self.firsts:
            for rule in rules - {item.rule for item in plan.broken}:
                found[rule] = min(found.get(rule, math.inf), change.distance)
        return found

    def _of_every_kind(self, alone: Collection[Setting]) -> Iterator[_Pair]:
        """Yield a few values of each setting for every first change: the nearest of every setting come first."""
        later = list[_Pair]()
        for first, changed, plan in self.firsts:
            better = left_of(plan.broken) < self.search.left
            for key, values in self._seconds(first, changed, plan):
                most = len(devices.DEVICES) if key == "cluster.gpu" and better else FEW
                soon = most if most > FEW else 3 if better else 2
                near = [change for change in nearest(changed, key, values, most) if setting_of(change) not in alone]
                yield from ((first, changed, second) for second in near[:soon])
                later += [(first, changed, second) for second in near[soon:]]
        yield from later

    def _seconds(self, first: Change, changed: Config, plan: PlanBuilder) -> Iterator[tuple[str, set[Any]]]:
        """Yield the settings that a second change may be of, with the values that are worth a try."""
        topics = topics_of(plan.broken)
        for key, values in candidates(changed, plan, topics, self.search.rows).items():
            if key == first.key or _has_no_part(key, topics, server=plan.server):
                continue
            if self.machines or not distances.is_of_machines(key):
                yield key, values


def _settings(pair: _Pair) -> frozenset[Setting]:
    return frozenset((setting_of(pair[0]), setting_of(pair[2])))


def _distance(pair: _Pair) -> float:
    return together((pair[0], pair[2]))


def _has_no_part(key: str, topics: frozenset[Topic], *, server: bool) -> bool:
    """Return whether no value of the setting can have a part in rules of these topics."""
    if topics == {Topic.MEMORY}:
        return key in _WEIGHTLESS
    if topics != {Topic.COUNTS} or key == "cluster.gpus_per_node":
        return False
    return key.startswith(_UNCOUNTED) or key == "parallel.sequence_parallel" or (not server and key in _OF_ENGINES)
