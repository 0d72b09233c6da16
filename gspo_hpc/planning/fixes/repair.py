"""Repairs of plans with several independent faults, for which no change of one or two settings is enough.

Rules are repaired one after another, with the nearest of the changes that leave the fewest rules broken. Where that
ends with a rule that nothing mends, or with other hardware, the next best changes are tried in its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.fixes.search import Change, Fix, Search, is_same
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import topic
from gspo_hpc.planning.settings import value_of, with_value

_LONGEST = 8  # changes of one repair
_BRANCHES = 3  # changes that are tried in the place of one another
_LOOKED_AT = 16  # configs on the way, at most, for which changes are searched
_ROOM = 600  # pairs of changes that are looked at where no single one mends anything

Changes = tuple[Change, ...]


class _Way(NamedTuple):
    """Changes on the way to a repair."""

    others: int = 0  # how often another change than the best one was taken
    number: int = 0  # of this way, among all
    changes: Changes = ()
    kept: frozenset[str] = frozenset()  # settings of changes that belong together: a layout, an argument's other name


def find(config: Config, rows: int | None = None) -> Fix | None:
    """Return a fix of several settings, or one after which as few rules as possible are broken (its `left`).

    None if no change leaves fewer rules broken, and for a valid plan. `rows` is that of make_plan.
    """
    found: list[Fix] = []
    for way, plan in _ends(config, rows):
        found.append(_needed(config, way, plan, rows))
        if plan.valid and _size(way.changes) < distances.Size.HARDWARE:
            break
    return min((fix for fix in found if fix.changes), default=None, key=_cost)


def _ends(config: Config, rows: int | None) -> Iterator[tuple[_Way, Plan]]:
    """Yield the changes that lead to a valid plan or to a dead end, and that plan.

    The way of the best changes comes first, then those on which the next best were taken once, and so on.
    """
    ways, seen = [_Way()], {frozenset[str]()}
    for _ in range(_LOOKED_AT):
        if not ways:
            return
        way = heapq.heappop(ways)
        now = _with(config, way.changes)
        plan = make_plan(now, rows)
        nexts = [] if plan.valid or len(way.changes) >= _LONGEST else _nexts(now, rows, plan)
        if not nexts:
            yield way, plan
        for rank, fix in enumerate(nexts):
            changes = _together(config, (*way.changes, *fix.changes))
            if (key := frozenset(map(str, changes))) not in seen:
                seen.add(key)
                kept = way.kept | {change.key for change in fix.changes if len(fix.changes) > 1}
                heapq.heappush(ways, _Way(way.others + rank, len(seen), changes, kept))


def _nexts(config: Config, rows: int | None, plan: Plan) -> list[Fix]:
    """Return the fix of all that is broken, or else the changes that mend most, the best first.

    Other machines come last, even if they mend everything.
    """
    search = Search(config, rows, plan)
    singles = search.singles()
    here = [fix for fix in singles if _size(fix.changes) < distances.Size.HARDWARE] or search.layout()
    if here:
        return here[:1]
    firsts = [Fix((change,)) for change in search.best_firsts(_BRANCHES)]
    return [*(firsts or search.pairs(_ROOM)[:1]), *singles[:1]]  # a pair: of sizes that are wrong in the same rule


def _together(config: Config, changes: Changes) -> Changes:
    """Return what changes made one after another come to: one for each setting that is not again what it was."""
    last = {change.key: change.value for change in changes}
    found = (Change(key, value_of(config, key), value) for key, value in last.items())
    return tuple(change for change in found if not is_same(change.key, change.before, change.value))


def _needed(config: Config, way: _Way, plan: Plan, rows: int | None) -> Fix:
    """Return the fix without those changes that mend nothing: a later one may have made an earlier one needless."""
    changes = way.changes
    for change in sorted(changes, key=lambda one: one.distance, reverse=True):
        others = tuple(one for one in changes if one is not change)
        if change.key not in way.kept:
            without = make_plan(_with(config, others), rows)
            if _rules(without) <= _rules(plan):
                changes, plan = others, without
    return Fix(changes, left=tuple(dict.fromkeys(item.rule for item in plan.broken)))


def _rules(plan: Plan) -> set[RuleId]:
    return {item.rule for item in plan.broken}


def _with(config: Config, changes: Sequence[Change]) -> Config:
    for change in changes:
        config = with_value(config, change.key, change.value)
    return config


def _size(changes: Sequence[Change]) -> int:
    return max((int(distances.size(change.key)) for change in changes), default=0)


def _cost(fix: Fix) -> tuple[float, ...]:
    """Return what repairs are compared by: what is left broken, the size of the changes, their number and distance.

    Memory is looked at only where every other rule holds: to lack nothing else is further.
    """
    others = sum(topic(rule) is not Topic.MEMORY for rule in fix.left)
    return others, len(fix.left), _size(fix.changes), len(fix.changes), fix.distance
