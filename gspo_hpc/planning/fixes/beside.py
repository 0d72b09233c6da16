"""Fixes that stand beside others: with one switch more, after which memory leaves room, and with fewer machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.fixes.candidates import candidates, lighter
from gspo_hpc.planning.fixes.change import FEW, Change, Fix, is_near, nearest, settings_of, together, with_changes
from gspo_hpc.planning.fixes.faults import topics_of
from gspo_hpc.planning.plan import judge
from gspo_hpc.planning.settings import ENGINE, with_value

if TYPE_CHECKING:
    from gspo_hpc.planning.fixes.search import Search

_LOOKED_AT = 3  # fixes of a list


def roomier(search: Search, fix: Fix) -> Fix | None:
    """Return the nearest fix that has one switch more than this one and fewer warnings; None if that is not nearer."""
    if not fix.warnings or fix.left or fix.moved:
        return None
    config = with_changes(search.config, fix.changes)
    plan = search.judge(config)
    if plan is None or len(plan.tight) <= search.tight:  # the warning is about something else
        return None
    for change in _switches(config, settings_of(fix)):
        if together((*fix.changes, change)) >= fix.distance:
            return None
        plan = search.judge(with_value(config, change.key, change.value))
        found = search.fix(plan, *sorted((*fix.changes, change), key=lambda one: one.distance))
        if found is not None and found.warnings < fix.warnings:
            return found if found.distance < fix.distance else None
    return None


def with_roomier(search: Search, fixes: Sequence[Fix]) -> list[Fix]:
    """Return fixes in their order, and behind the first that fit only just what is nearer and leaves room.

    Where a fix of the same machines that is as near leaves room anyway, nothing is added.
    """
    found, looked_at = list[Fix](), 0
    here = [fix for fix in fixes if not any(distances.is_of_machines(one.key) for one in fix.changes)]
    within = min((fix.distance for fix in here if not fix.warnings), default=math.inf)
    for fix in fixes:
        found.append(fix)
        if fix in here and fix.warnings and looked_at < _LOOKED_AT:
            looked_at += 1
            more = roomier(search, fix)
            if more is not None and more.distance < within:
                found.append(more)
                within = more.distance
    return found


def of_fewer_machines(search: Search, fix: Fix) -> list[Fix]:
    """Return the fix with fewer machines than there are, where this one takes more, if it is about as near."""
    for change in fix.changes:
        if not is_more_machines(change):
            continue
        others = [one for one in fix.changes if one is not change]
        config = with_changes(search.config, others)
        plan = judge(config, search.rows, search.models)
        values = candidates(config, plan, topics_of(plan.broken), search.rows).get(change.key, ())
        for fewer in nearest(config, change.key, [value for value in values if value < change.start], FEW):
            found = search.fix(search.judge(with_value(config, fewer.key, fewer.value)), *others, fewer)
            if found is not None:
                return [found] if is_near(found, [fix]) else []
    return []


def is_more_machines(change: Change) -> bool:
    """Return whether a change makes a number of machines larger."""
    numbers = distances.is_number(change.start) and distances.is_number(change.value)
    return distances.is_of_machines(change.key) and numbers and bool(change.value > change.start)


def _switches(config: Config, made: set[str]) -> list[Change]:
    """Return the changes that take less memory of the trainer and leave the numbers as they are, the nearest first."""
    changes = [
        change
        for key, values in lighter(config).items()
        if key not in made and not key.startswith(ENGINE) and distances.size(key) is distances.Size.SWITCH
        for change in nearest(config, key, values, FEW)
    ]
    return sorted(changes, key=lambda one: one.distance)
