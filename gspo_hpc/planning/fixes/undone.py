"""The fix that takes settings of the command line back, as far as it must.

Where several of them do not suit the others, the nearest fixes may be far, and what the file says is known to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Config, keys
from gspo_hpc.planning.fixes.change import Change, Fix, is_same, with_changes
from gspo_hpc.planning.settings import ENGINE, value_of

if TYPE_CHECKING:
    from gspo_hpc.planning.fixes.search import Search

_LEFT_ALONE = ("algorithm.", "rollout.engine")  # keys of the one depend on its name; those of the other are apart


def find(search: Search, file: Config) -> Fix | None:
    """Return the fix that takes back what must be of the settings in which a config differs from its file.

    Each has the value of the file, or one that is nearer to what was given and is enough. None if the plan would be
    refused even without all of them.
    """
    changes = _differing(search.config, file)
    fix = _fix(search, changes)
    needless = fix is not None
    while fix is not None and needless:  # what was needed beside another setting may be needless without it
        needless = False
        for change in sorted(fix.changes, key=lambda one: one.distance, reverse=True):
            fewer = _fix(search, [one for one in fix.changes if one is not change])
            if fewer is not None:
                fix, needless = fewer, True
                break
    return None if fix is None else search.nearer(fix)


def _differing(config: Config, file: Config) -> list[Change]:
    """Return the changes that make a config what its file says."""
    names = [key for key in keys() if not key.startswith(_LEFT_ALONE)]
    names += [ENGINE + name for name in {**config.rollout.engine, **file.rollout.engine}]
    pairs: Iterable[tuple[str, Any, Any]] = ((key, value_of(config, key), value_of(file, key)) for key in names)
    return [
        Change(key, before, value)
        for key, before, value in pairs
        if not is_same(key, before, value) and _is_plain(before) and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    """Tell whether a value can be written on the command line: sources and reward functions are sections of a file."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _fix(search: Search, changes: list[Change]) -> Fix | None:
    plan = search.judge(with_changes(search.config, changes)) if changes else None
    return search.fix(plan, *sorted(changes, key=lambda one: one.distance))
