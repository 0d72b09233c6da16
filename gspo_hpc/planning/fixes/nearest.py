"""The nearest repairs of a refused plan, of as many settings as it takes.

Every repair must change something about each rule that is broken. So one broken rule is taken at a time, the one that
the fewest changes mend, and each of these is the beginning of another way on. Ways are followed in the order of the
distance that a repair on them has at least, which finds the nearest repair first, as long as the settings that mend a
rule are those that mended it where it was first met.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.fixes import beside, by_type, distances
from gspo_hpc.planning.fixes.candidates import candidates
from gspo_hpc.planning.fixes.change import Change, Fix, nearest, settings_of, together, with_changes
from gspo_hpc.planning.fixes.faults import topics_of
from gspo_hpc.planning.fixes.search import FARTHEST, Search
from gspo_hpc.planning.mentions import mentioned
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import topic
from gspo_hpc.planning.settings import with_value

_LONGEST = 6  # changes of one repair
_VALUES = 8  # of a setting that are tried in one place
_ALL = 99  # broken rules: all of them are wanted
_LOOKED_AT = 200  # changes of several settings that may mend a rule which none mends alone
_MEMORY_COST = 4  # plans that take as long as one with its memory
_OF_ENGINES = ("rollout.tensor_parallel_size", "rollout.engines_per_node")  # set apart, they leave fewer ranks


class _Way(NamedTuple):
    """Changes on the way to a repair."""

    least: float  # distance that a repair on this way has at least
    number: int  # of this way, among all: the earlier one of two that are as near
    changes: tuple[Change, ...]
    config: Config  # with these changes
    fix: Fix | None = None  # what they are, if every rule holds


class _Step(NamedTuple):
    """A change that mends a rule."""

    change: Change
    config: Config
    left: frozenset[RuleId]  # broken after it


class Nearest:
    """The search for the nearest repairs of one plan."""

    def __init__(self, search: Search, room: int, *, machines: bool) -> None:
        self.search, self.room, self.machines = search, room, machines
        self.settings: dict[RuleId, set[str]] = {}  # that have a part in a rule, where it was first met
        self.least: dict[RuleId, float] = {}  # the distance of their smallest change
        self.several: dict[RuleId, float] = {}  # that of several changes, where none alone mends the rule

    def find(self, wanted: int, within: float = math.inf) -> list[Fix]:
        """Return at most `wanted` repairs of different settings that are nearer than `within`, the nearest first."""
        ways, seen, found = [_Way(0.0, 0, (), self.search.config)], {frozenset[str]()}, list[Fix]()
        while ways and self.room > 0 and len(found) < wanted:
            way = heapq.heappop(ways)
            if found and way.least > FARTHEST * found[0].distance:
                break
            if way.fix is not None:
                found += [way.fix] if way.fix not in found else []
                continue
            settings = {change.key for change in way.changes}
            if any(settings >= settings_of(fix) for fix in found):
                continue
            plan = self._judge(way.config)
            if plan is None:
                continue
            if not plan.broken:
                fix = self.search.fix(plan, *way.changes) if self.search.is_run(plan) else None
                fix = None if fix is None else self.search.nearer(self._needed(fix))
                for one in [fix, beside.roomier(self.search, fix)] if fix is not None else []:
                    key = frozenset(map(str, one.changes)) if one is not None else frozenset()
                    if one is not None and one.distance < within and (one is fix or key not in seen):
                        seen.add(key)
                        number = way.number if one is fix else len(seen)
                        heapq.heappush(ways, _Way(one.distance, number, one.changes, way.config, one))
                continue
            for least, step in self._steps(way, plan, within) if len(way.changes) < _LONGEST else ():
                changes = (*way.changes, step.change)
                if (key := frozenset(map(str, changes))) not in seen:
                    seen.add(key)
                    heapq.heappush(ways, _Way(least, len(seen), changes, step.config))
        return found

    def _judge(self, config: Config) -> PlanBuilder | None:
        plan = self.search.judge(config, _ALL, on_the_way=True)
        self.room -= 1 + _MEMORY_COST * (plan is not None and plan.memory is not None)
        return plan

    def _needed(self, fix: Fix) -> Fix:
        """Return the nearest of the fixes that some of these changes are: two may only make up for each other."""
        some = (part for count in range(1, len(fix.changes)) for part in itertools.combinations(fix.changes, count))
        for changes in sorted(some, key=together):
            plan = self._judge(with_changes(self.search.config, changes))
            found = self.search.fix(plan, *changes) if plan is not None and self.search.is_run(plan) else None
            if found is not None and found.distance <= fix.distance:
                return found
        return fix

    def _steps(self, way: _Way, plan: PlanBuilder, within: float) -> Iterator[tuple[float, _Step]]:
        """Yield the changes that mend one of the broken rules, with the distance that a repair then has at least.

        So do those that leave it broken, and nothing else: two sizes may be wrong in the same product.
        """
        made, done = {change.key for change in way.changes}, together(way.changes)
        broken = {item.rule for item in plan.broken}
        if broken <= self.settings.keys():
            rule = min(broken, key=lambda rule: (len(self.settings[rule] - made), rule))
            steps = [*self._tried(way, plan, self.settings[rule] - made, within - done)]
        else:
            steps = [*self._tried(way, plan, None, within - done)]
            self._learn(plan, steps)
            rule = min(broken, key=lambda rule: (len(self.settings[rule] - made), rule))
        for step in steps:
            if step.change.key in self.settings[rule] and (rule not in step.left or step.left <= broken):
                changes = (*way.changes, step.change)
                yield together(changes, self._at_least(step.left, changes)), step

    def _at_least(self, left: AbstractSet[RuleId], made: Sequence[Change] = ()) -> list[float]:
        """Return the distances of changes that mend these rules: of those that have no setting in common."""
        least = {rule: self._rest(rule, made) for rule in left & self.least.keys()}
        found, used = list[float](), set[str]()
        for rule in sorted(least, key=lambda rule: (-least[rule], rule)):
            if not used & self.settings[rule]:
                found.append(least[rule])
                used |= self.settings[rule]
        return found

    def _rest(self, rule: RuleId, made: Sequence[Change]) -> float:
        """Return the distance of what is still to be changed for a rule: one setting, or several less those made."""
        done = _sum(change for change in made if change.key in self.settings[rule])
        return max(self.least[rule], self.several.get(rule, 0.0) - done)

    def _learn(self, plan: PlanBuilder, steps: Sequence[_Step]) -> None:
        """Note the settings that have a part in broken rules that are new, and their smallest change.

        Engines that are set apart leave fewer ranks: two changes, of which neither is enough alone, may be the nearest.
        """
        of_ranks = {item.rule for item in plan.broken if plan.server and "world_size" in item.message}
        for item in plan.broken:
            if item.rule not in self.settings:
                mending = {step.change.key for step in steps if item.rule not in step.left}
                apart = _OF_ENGINES if item.rule in of_ranks else ()
                self.settings[item.rule] = mending | {*mentioned(item.message), *apart}
        for rule in {item.rule for item in plan.broken} - self.least.keys():
            own = [step for step in steps if step.change.key in self.settings[rule]]
            here = [step for step in own if _size(step) < distances.Size.HARDWARE]
            alone = [step for step in here if rule not in step.left or rule in of_ranks]
            self.least[rule] = min((step.change.distance for step in alone or own), default=0.0)
            by_one = any(rule not in step.left for step in own) or rule in of_ranks
            if not by_one and topic(rule) in (Topic.GRID, Topic.COUNTS):
                self.several[rule] = self._of_several(rule, [step.change for step in own])

    def _of_several(self, rule: RuleId, changes: Sequence[Change]) -> float:
        """Return the distance of the nearest changes of several settings that mend a rule which no change mends alone.

        Where they are not found soon, they are at least as far as those that were looked at.
        """
        some = (chosen for count in (2, 3) for chosen in itertools.combinations(changes, count))
        apart = [chosen for chosen in some if len({change.key for change in chosen}) == len(chosen)]
        least = 0.0
        for chosen in sorted(apart, key=_sum)[:_LOOKED_AT]:
            least = _sum(chosen)
            plan = self._judge(with_changes(self.search.config, chosen))
            if plan is not None and all(item.rule is not rule for item in plan.broken):
                break
        return least

    def _tried(self, way: _Way, plan: PlanBuilder, only: AbstractSet[str] | None, within: float) -> Iterator[_Step]:
        """Yield changes of one setting each, of these settings if only they are wanted, with what they leave broken."""
        values = candidates(way.config, plan, topics_of(plan.broken), self.search.rows)
        if only is None or not only <= values.keys():
            values = by_type.candidates(way.config, plan.broken) | values
        made = {change.key for change in way.changes}
        for key in sorted((values.keys() if only is None else only & values.keys()) - made):
            if self.machines or distances.size(key) < distances.Size.HARDWARE:
                yield from self._of_setting(way.config, plan, nearest(way.config, key, values[key], _VALUES), within)

    def _of_setting(
        self, config: Config, before: PlanBuilder, changes: Iterable[Change], within: float
    ) -> Iterator[_Step]:
        """Yield these changes with what they leave broken, but for those after which it can no longer be told."""
        for change in list(changes)[:_VALUES]:
            if change.distance >= within:
                return
            changed = with_value(config, change.key, change.value)
            plan = self._judge(changed)
            if plan is None or (plan.world is None and before.world is not None):
                continue
            left = {item.rule for item in plan.broken}
            if any(
                topic(rule) is not Topic.MEMORY for rule in left
            ):  # memory is looked at where nothing else is broken
                left |= {item.rule for item in before.broken if topic(item.rule) is Topic.MEMORY}
            yield _Step(change, changed, frozenset(left))


def _size(step: _Step) -> distances.Size:
    return distances.size(step.change.key)


def _sum(changes: Iterable[Change]) -> float:
    return sum(change.distance for change in changes)
