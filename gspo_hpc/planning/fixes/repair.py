"""Repairs of plans with several independent faults, for which no change of one or two settings is enough or is near.

nearest.py has those that it can find; where it finds none, rules are repaired one after another, with the nearest of
the changes that leave the fewest rules broken. Where that ends with a rule that nothing mends, or with other hardware,
the next best changes are tried in its place.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import beside, distances, search, undone
from gspo_hpc.planning.fixes.change import Change, Fix, is_same, settings_of, with_changes, without_repeated
from gspo_hpc.planning.fixes.nearest import Nearest
from gspo_hpc.planning.fixes.pairs import ROOM, Pairs
from gspo_hpc.planning.fixes.search import FARTHEST, Search
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import topic
from gspo_hpc.planning.settings import value_of

_LONGEST = 8  # changes of one repair
_BRANCHES = 3  # changes that are tried in the place of one another
_LOOKED_AT = 16  # configs on the way, at most, for which changes are searched
_WANTED = 3  # repairs that leave the machines as they are
_OF_SETTINGS, _OF_MACHINES = 6000, 5000  # plans that are looked at for the nearest repairs, without and with machines
_ROOM = 600  # pairs of changes that are looked at where no single one mends anything

Changes = tuple[Change, ...]


class _Way(NamedTuple):
    """Changes on the way to a repair."""

    others: int = 0  # how often another change than the best one was taken
    number: int = 0  # of this way, among all
    changes: Changes = ()
    kept: frozenset[str] = frozenset()  # settings of changes that belong together: a layout, an argument's other name


def offered(config: Config, rows: int | None = None, file: Config | None = None) -> list[Fix]:
    """Return what `plan` offers for a refused plan: fixes of one setting and of two, and nearer ones of several.

    Another model is another experiment, so that what can be repaired of this one goes before it, even if it is not all.
    With `file`, what the config's file says without the settings of the command line, taking some of these back is
    offered, too, where no change of one setting is enough.
    """
    plan = make_plan(config, rows)
    if plan.valid:
        return []
    whole = Search(config, rows, plan)
    fixes = _offered(whole, rows)
    if file is None or any(len(fix.changes) == 1 and not fix.left for fix in fixes):
        return fixes
    back = undone.find(whole, file)
    if back is None or settings_of(back) in [settings_of(fix) for fix in fixes if fix.distance <= back.distance]:
        return fixes
    nearer = [fix for fix in fixes if not fix.left and fix.distance <= back.distance]
    return [*nearer, back, *(fix for fix in fixes if fix not in nearer)]


def _offered(whole: Search, rows: int | None) -> list[Fix]:
    config = whole.config
    fixes = whole.found(search.MAX_OFFERED, ROOM)
    if whole.answered:
        return fixes
    models = [fix for fix in fixes if all(change.key == "model.path" for change in fix.changes)]
    others = [fix for fix in fixes if fix not in models]
    alone = [fix.changes[0].key for fix in others if len(fix.changes) == 1]
    unseen = Topic.MEMORY not in whole.topics  # of other cards alone: a repair that keeps these was not looked for yet
    if any(not (unseen and distances.is_of_machines(key)) for key in alone):
        return fixes
    within = min((fix.distance for fix in others), default=math.inf)
    further = bool(alone) and all(_size(fix.changes) >= distances.Size.HARDWARE for fix in others)
    found = find_all(config, rows, within * (FARTHEST if further else 1.0), further=further)
    here = [fix for fix in found if _size(fix.changes) < distances.Size.HARDWARE]
    there = [] if further else [fix for fix in found if fix not in here]
    return without_repeated([*here, *others, *there, *models], whole.told.all)


def find(config: Config, rows: int | None = None) -> Fix | None:
    """Return a fix of several settings, or one after which as few rules as possible are broken (its `left`).

    None if no change leaves fewer rules broken, and for a valid plan. `rows` is that of make_plan.
    """
    return next(iter(find_all(config, rows)), None)


def find_all(config: Config, rows: int | None = None, within: float = math.inf, *, further: bool = False) -> list[Fix]:
    """Return the nearest fixes of different settings, those that leave the machines as they are first.

    With `within`, only those that are nearer; `further`: also such as only repairing one rule after another finds.
    Without it, where there is none, the one after which as few rules as possible are broken.
    """
    plan = make_plan(config, rows)
    if plan.valid:
        return []
    whole = Search(config, rows, plan)
    if renamed := whole.renamed():
        return _after(config, rows, renamed, within)
    found = Nearest(whole, _OF_SETTINGS, machines=False).find(_WANTED, within)
    found = [fix for fix in found if fix.distance <= FARTHEST * found[0].distance]
    partly = _one_by_one(config, rows) if not found and (further or within == math.inf) else None
    if partly is not None and not partly.left and (nearer := whole.nearer(partly)).distance < within:
        found.append(nearer)
    least = min((fix.distance for fix in found), default=within)
    for fix in Nearest(whole, _OF_MACHINES, machines=True).find(1, least):
        found += [fix, *beside.of_fewer_machines(whole, fix)]
    return found or ([partly] if partly is not None and within == math.inf else [])


def _after(config: Config, rows: int | None, first: Fix, within: float) -> list[Fix]:
    """Return the fixes that give arguments of engines the name that counts before anything else is changed."""
    changed = with_changes(config, first.changes)
    if make_plan(changed, rows).valid:
        return [first] if first.distance < within else []
    rest = (replace(one, changes=(*first.changes, *one.changes)) for one in find_all(changed, rows, within))
    return [fix for fix in rest if fix.left or fix.distance < within]


def _one_by_one(config: Config, rows: int | None) -> Fix | None:
    """Return the best of the repairs in which rules are mended one after another."""
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
        now = with_changes(config, way.changes)
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
    here_on = Search(config, rows, plan)
    singles = here_on.singles()
    here = [fix for fix in singles if _size(fix.changes) < distances.Size.HARDWARE] or here_on.layout()
    if here:
        return here[:1]
    firsts = [Fix((change,)) for change in here_on.best_firsts(_BRANCHES)]
    return [
        *(firsts or Pairs(here_on).find(_ROOM)[:1]),
        *singles[:1],
    ]  # a pair: of sizes that are wrong in the same rule


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
            without = make_plan(with_changes(config, others), rows)
            if _rules(without) <= _rules(plan):
                changes, plan = others, without
    return Fix(changes, left=tuple(dict.fromkeys(item.rule for item in plan.broken)))


def _rules(plan: Plan) -> set[RuleId]:
    return {item.rule for item in plan.broken}


def _size(changes: Sequence[Change]) -> int:
    return max((int(distances.size(change.key)) for change in changes), default=0)


def _cost(fix: Fix) -> tuple[float, ...]:
    """Return what repairs are compared by: what is left broken, the size of the changes, their number and distance.

    Memory is looked at only where every other rule holds: to lack nothing else is further.
    """
    others = sum(topic(rule) is not Topic.MEMORY for rule in fix.left)
    return others, len(fix.left), _size(fix.changes), len(fix.changes), fix.distance
