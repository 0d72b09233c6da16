"""Fixes: the changes of settings they consist of, how far they are from the config, and which are worth showing."""

from __future__ import annotations

import bisect
import json
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.settings import ENGINE, value_of, with_value

FEW = 6  # values of a setting, of which only the nearest are taken
_AS_NEAR = 1.5  # times as far as the nearest fix of the same settings
_OTHER_SIDE = 4.0  # times as far as the nearest value, on the other side of the present one
# Both ends of a pipeline: of 94 layers on 4 stages 23 for each are more even than 22 for one.
_CHOSEN_AS_ONE = {f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")}


@dataclass(frozen=True)
class Change:
    """A change of one setting, by its dotted name. `value` None is the setting's default, written null."""

    key: str
    before: Any = field(hash=False)  # a config may say anything, also a list
    value: Any

    @cached_property
    def distance(self) -> float:
        """The distance from the config: how much the run changes. A search asks it of each change a hundred times."""
        return distances.between(self.key, self.before, self.value)

    @property
    def start(self) -> Any:
        """The value from which the distance counts: what is given, or the number that counts without."""
        return distances.start(self.key, self.before)

    def __str__(self) -> str:
        if isinstance(self.value, Mapping) and self.value:  # a shell would take its quotes and blanks away
            text = json.dumps(dict(self.value), ensure_ascii=False)
            # What YAML does not take as it stands, such as line separators and control characters, is escaped.
            text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
            return shlex.quote(f"{self.key}={text}")
        return f"{self.key}={written(self.value)}"


Setting = tuple[str, Any]  # a key and its value


def setting_of(change: Change) -> Setting:
    """Return the setting that a change leads to."""
    return change.key, change.value


@dataclass(frozen=True)
class Fix:
    """Changes that together make every rule hold, or all but those in `left`."""

    changes: tuple[Change, ...]
    warnings: int = 0  # how many more warnings the plan has then
    left: tuple[RuleId, ...] = ()  # rules that are broken even then, in a repair of as many as can be
    moved: bool = False  # what is given stays, under another name

    def __str__(self) -> str:
        return " ".join(map(str, self.changes))

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values, as `gspo-hpc plan --json` prints them."""
        return [{"key": one.key, "before": one.before, "value": one.value} for one in self.changes]

    @property
    def distance(self) -> float:
        """The distance from the config.

        Every doubling or halving counts by the weight of its setting; a new warning counts 2, one more setting and
        another name little.
        """
        changes = distances.MOVED if self.moved else together(self.changes)
        return changes + 2.0 * self.warnings


def together(changes: Iterable[Change], others: Iterable[float] = ()) -> float:
    """Return the distance of changes that are made together, and of others of which only their distance is known.

    One more choice counts a little: both ends of a pipeline are one.
    """
    made, more = [*changes], [*others]
    ends = _CHOSEN_AS_ONE <= {change.key for change in made}
    choices = len(made) + len(more) - ends
    return sum((*(change.distance for change in made), *more)) + distances.EACH_MORE * max(0, choices - 1)


def with_changes(config: Config, changes: Iterable[Change]) -> Config:
    """Return the config with these changes."""
    for change in changes:
        config = with_value(config, change.key, change.value)
    return config


def settings_of(fix: Fix) -> set[str]:
    """Return the names of the settings that a fix changes."""
    return {change.key for change in fix.changes}


def is_near(fix: Fix, shown: Sequence[Fix]) -> bool:
    """Return whether a fix is worth showing beside others of the same settings, the first of which is the nearest.

    Of numbers, those on the other side of the present one that are near: 2 beside 4 where 3 is wrong, and neither 1
    nor 8. And a power of two that is about as large as the present one, which people prefer: 8 beside 7 for 6. And one
    that is nearer, and not the first only because it brings a warning.
    """
    first = shown[0]
    if len(fix.changes) > 1:
        return fix.distance <= _AS_NEAR * first.distance and not any(_is_no_better(fix, other) for other in shown)
    change, weight = fix.changes[0], distances.weight(fix.changes[0].key)
    if not (distances.is_number(change.start) and distances.is_number(change.value)):
        return True
    sides = {
        one.value > one.start for other in shown for one in other.changes if distances.is_number(one.value)
    }  # of the present value, on which a number is shown
    if is_round(change):
        return True
    if change.distance < min(one.distance for other in shown for one in other.changes):
        return True
    farthest = max(_OTHER_SIDE * first.distance, weight / 2)
    return (change.value > change.start) not in sides and fix.distance <= farthest


def _is_no_better(fix: Fix, other: Fix) -> bool:
    """Return whether a fix changes the same settings in the same directions as another one, and none of them less.

    One that changes something less and brings a warning for that is no better. Of two lengths that share a sum, either
    may be the one that matters.
    """
    if settings_of(fix) != settings_of(other):
        return False
    before = {change.key: change for change in other.changes}
    both = [(change, before[change.key]) for change in fix.changes]
    if not all(_is_one_direction(*pair) for pair in both):
        return False
    return fix.warnings > other.warnings or all(mine.distance >= theirs.distance for mine, theirs in both)


def _is_one_direction(change: Change, other: Change) -> bool:
    """Return whether both changes of a setting make it larger, or both smaller, or give a number where none was."""
    if distances.is_number(change.value) and distances.is_number(other.value):
        start = change.start
        return not distances.is_number(start) or (change.value > start) == (other.value > start)
    return is_same(change.key, change.value, other.value)


def without_repeated(fixes: Iterable[Fix], kept: Collection[Fix] = ()) -> list[Fix]:
    """Return fixes in their order, without those that say nothing new, unless they are `kept`.

    Such a fix changes the same settings as one before it to no better values, or each of its several changes is part of
    one before it: what repairs one rule need not be told with everything that repairs another one.
    """
    found = list[Fix]()
    for fix in fixes:
        told = {setting_of(change) for other in found if len(other.changes) > 1 for change in other.changes}
        several = len(fix.changes) > 1 and fix not in kept
        if several and not fix.left and told.issuperset(map(setting_of, fix.changes)):
            continue
        if fix not in found and not (several and any(_is_no_better(fix, other) for other in found)):
            found.append(fix)
    return found


def is_round(change: Change) -> bool:
    """Return whether a number becomes a power of two that is less than half a doubling away."""
    value, before = change.value, change.start
    if not (isinstance(value, int) and distances.is_number(before)):
        return False
    return value > 0 and value & (value - 1) == 0 and before / 1.414 < value < before * 1.414


def is_nearly_alone(fix: Fix, singles: Sequence[Fix]) -> bool:
    """Return whether one of two changes is enough alone, as it is or about so.

    With another value its setting is a fix that is no farther than both, or one that is within a fiftieth: 8190 beside
    8192, with another length. Settings that people choose as one are left as they are.
    """
    if settings_of(fix) == _CHOSEN_AS_ONE:
        return False
    if any(settings_of(single) <= settings_of(fix) and single.distance <= fix.distance for single in singles):
        return True
    numbers = [
        (change.key, change.value)
        for single in singles
        for change in single.changes
        if distances.is_number(change.value)
    ]
    return any(
        key == change.key and distances.is_number(change.value) and abs(change.value - value) < value / 50
        for change in fix.changes
        for key, value in numbers
    )


def nearest(config: Config, key: str, values: Iterable[Any], most: int) -> list[Change]:
    """Return changes to these values, nearest first; of more than `most`, the nearest and some of the others.

    Where `most` is FEW or less, just the nearest.
    """
    before, chosen = value_of(config, key), set(values)
    if len(chosen) > most and distances.is_number(start := distances.start(key, before)):
        numbers = sorted(value for value in chosen if distances.is_number(value))
        at = bisect.bisect_left(numbers, start)
        near = {*numbers[max(0, at - most // 2 - 1) : at + most // 2 + 2]}
        far = numbers[:: -(-2 * len(numbers) // most)] if most > FEW else []
        chosen = {value for value in chosen if not distances.is_number(value)} | near | {*far}
    changes = [Change(key, before, value) for value in chosen if not is_same(key, before, value)]
    changes.sort(key=lambda one: (one.distance, one.value if distances.is_number(one.value) else math.inf, str(one)))
    return changes if most > FEW else changes[:most]


def is_same(key: str, one: Any, other: Any) -> bool:
    """Return whether two values of a setting are the same. vLLM does not take 1000.0 for 1000."""
    return one == other and not (key.startswith(ENGINE) and type(one) is not type(other))
