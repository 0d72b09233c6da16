"""Fixes that `suggest` finds for a plan that lacks memory: its first layouts, or else each of its remedies.

Of layouts, the first one with the parallel sizes that the config gives comes before the first one of all: who has
chosen sizes wants to keep them. A remedy comes with the best layout with it, unless the layout of the config is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.rules.memory import MemoryRule
from gspo_hpc.planning.settings import value_of, with_value

if TYPE_CHECKING:
    from gspo_hpc.planning.fixes.search import Search

_OF_GPUS = (
    MemoryRule.TRAINER_FITS_GPU_MEMORY,
    MemoryRule.ENGINE_FITS_GPU_MEMORY,
    MemoryRule.KV_CACHE_HOLDS_LONGEST_SEQUENCE,
)
_LAYOUTS = 8  # among which the nearest one is looked for
# What a model is cut by, which another layout with the same sizes keeps.
_SIZES = frozenset(
    f"parallel.{name}_parallel_size"
    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)


class Suggested(NamedTuple):
    """The fixes that `suggest` finds: of one kind, or none where it cannot look for layouts."""

    layout: tuple[Fix, ...] = ()  # the best layouts of the GPUs that there are
    remedies: tuple[Fix, ...] = ()  # where none fits on these

    @property
    def all(self) -> tuple[Fix, ...]:
        """Return the fixes of both kinds."""
        return self.layout + self.remedies

    @property
    def found(self) -> bool:
        """Return whether there is any."""
        return bool(self.all)

    def without_others(self, fixes: Iterable[Fix]) -> list[Fix]:
        """Return the fixes of settings that no remedy changes: of other machines, remedies are the nearest.

        Where every remedy that changes a setting changes others too, the nearest fix of that setting alone stays.
        """
        changed = {change.key for fix in self.remedies for change in fix.changes}
        alone = {fix.changes[0].key for fix in self.remedies if len(fix.changes) == 1}
        kept = list[Fix]()
        for fix in sorted(fixes, key=lambda fix: fix.distance):
            key = fix.changes[0].key
            if key not in changed or not distances.is_of_machines(key):
                kept.append(fix)
            elif key not in alone:
                alone.add(key)
                kept.append(fix)
        return kept


def is_asked(search: Search) -> bool:
    """Return whether the plan lacks memory of a GPU: a layout is no help to a node that a job gives too little."""
    return any(item.rule in _OF_GPUS for item in search.broken)


def find(search: Search, *, remedies: bool = True) -> Suggested:
    """Return what `suggest` names first for the config; of `remedies`, which take longer, only if they are wanted."""
    from gspo_hpc.planning import layouts  # only here: most plans are fixed without

    def first(count: int, keep: frozenset[str] = frozenset()) -> list[Mapping[str, Any]]:
        """Return the settings of the first layouts with those that are kept."""
        found = layouts.Search(search.config, keep, models=search.models).ranked(count)
        return [{key: value_of(one.config, key) for key in layouts.PRINTED} for one in found]

    try:
        ranked = first(_LAYOUTS)
        kept = next(iter(first(1, _SIZES)), None) if ranked else None
    except ValueError:  # the GPU, or the sizes of the model, are not known
        return Suggested()
    if not ranked:
        return Suggested(remedies=tuple(_remedies(search))) if remedies else Suggested()
    best, *others = ranked
    cut = any(best[key] != value_of(search.config, key) for key in _SIZES)
    fixes = [_needed(search, kept)] if kept is not None and (cut or not remedies) else []
    if remedies:
        fixes.append(_fix(search, best))
    elif cut:  # a step of a repair, and not all that is wrong
        fixes.append(_needed(search, best))
    found = [fix for fix in fixes if fix is not None]
    if cut and (near := _nearest(search, others)) is not None and all(near.distance < fix.distance for fix in found):
        found.insert(0, near)
    return Suggested(layout=tuple(found))


def _nearest(search: Search, layouts: Iterable[Mapping[str, Any]]) -> Fix | None:
    """Return the nearest of these layouts, without what the plan does not need of it; None if none is a fix."""
    fixes = [fix for settings in layouts if (fix := _fix(search, settings)) is not None]
    if not fixes:
        return None
    near = min(fixes, key=lambda fix: sum(change.distance for change in fix.changes if change.key in _SIZES))
    return _needed(search, {change.key: change.value for change in near.changes})


def _remedies(search: Search) -> Iterator[Fix]:
    from gspo_hpc.planning.suggest import remedies  # only here, as above

    also_else = search.topics != {Topic.MEMORY}  # a layout is a part of a repair then, and brings no more than it takes
    for one in remedies.find(search.config):
        whole = one.changes | one.layout
        fix = _fix(search, one.changes) or (_needed(search, whole) if also_else else _fix(search, whole))
        if fix is not None:
            yield fix


def _needed(search: Search, settings: Mapping[str, Any]) -> Fix | None:
    """Return these settings as a fix, without those that the plan does not need, and each as near as it can be."""
    fix = _fix(search, settings)
    if fix is None:
        return None
    needless = True
    while needless:  # what was needed beside another change may be needless without it
        needless = False
        for change in sorted(fix.changes, key=lambda one: one.distance, reverse=True):
            less = _fix(search, {one.key: one.value for one in fix.changes if one is not change})
            if less is not None and less.distance < fix.distance:
                fix, needless = less, True
    return search.nearer(fix)


def _fix(search: Search, settings: Mapping[str, Any]) -> Fix | None:
    """Return these settings as a fix, if the plan with them keeps every rule."""
    config, changes = search.config, list[Change]()
    for key, value in settings.items():
        if value != (before := value_of(search.config, key)):
            config = with_value(config, key, value)
            changes.append(Change(key, before, value))
    return search.fix(search.judge(config), *changes) if changes else None
