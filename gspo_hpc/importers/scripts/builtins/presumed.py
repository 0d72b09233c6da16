"""Find what variables and arguments decide that a shell script asks for, and that nobody gives it here.

They count as not given. The script is read again as if they had been given something that is not known, and what
becomes of the two runs is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers.scripts.scope import is_unset

_MOST_READ = 60  # times that a script is read again
_MOST_TOLD = 6  # settings that a note names
_WHAT_IS_STARTED = "what is started"
_ADDED = "which arguments are added"


class Outcome(NamedTuple):
    """Hold what a script amounts to."""

    settings: Mapping[str, Any]  # of our config, by their keys
    carried: Mapping[str, Collection[str]]  # arguments -> keys of settings that they decide
    open: tuple[str, ...]  # arguments whose values are not known
    added: frozenset[str]  # words that may be any number of arguments
    around: Mapping[str, str]  # variables of the environment that show something, and set nothing
    possible: int  # further runs that start only if a condition holds that is not known


def told(
    missed: Mapping[str, str], before: Outcome, again: Callable[[Collection[str]], Outcome | None]
) -> Iterator[str]:
    """Yield a sentence on the variables (@: the arguments of the script) that decide something by not being given.

    `missed`: variable -> where the script asks for it. `again` reads the script as if these had values that are not
    known; it returns None where that cannot be converted.
    """
    left = [_MOST_READ]

    def decided(names: Collection[str]) -> list[str]:
        left[0] -= 1
        return _differing(before, again(names))

    def deciding(names: Sequence[str]) -> list[str]:
        """Return those of the names that decide something, all of them if it takes several together."""
        if not decided(names):
            return []
        if len(names) == 1 or left[0] <= 0:
            return [*names]
        half = len(names) // 2
        return [*deciding(names[:half]), *deciding(names[half:])] or [*names]

    if not missed or not (keys := decided([*missed])):
        return
    names = deciding([*missed])
    given = [f"the script's arguments ({missed[one]})" if one == "@" else f"${one} ({missed[one]})" for one in names]
    more = [f"{len(keys) - _MOST_TOLD} more"] if len(keys) > _MOST_TOLD else []
    yield (
        f"{_listed(given)} {'is' if names != ['@'] and len(names) == 1 else 'are'} not set here, and may decide "
        f"{_listed([*keys[:_MOST_TOLD], *more])}: the original run may have had other values"
    )


def _differing(before: Outcome, after: Outcome | None) -> list[str]:
    """Return the arguments that are open only after, and the settings that differ for another reason."""
    if after is None or after.possible != before.possible:
        return [_WHAT_IS_STARTED]
    opened = [name for name in after.open if name not in before.open]
    theirs = {key for name in opened for key in before.carried.get(name, ())}
    every = {**before.settings, **after.settings}
    keys = [key for key in every if not _same(before.settings.get(key), after.settings.get(key)) and key not in theirs]
    every = {**before.around, **after.around}
    keys += [name for name in every if before.around.get(name) != after.around.get(name)]
    return [*opened, *keys, *([_ADDED] if after.added - before.added else [])]


def _same(one: Any, other: Any) -> bool:
    """Tell whether two values are the same, or both not known, by whatever names."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_same, one, other))
    return bool(one == other or (is_unset(one) and is_unset(other)))


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
