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
_WHETHER = "whether the run is started at all"
_ADDED = "which arguments are added"


class Run(NamedTuple):
    """A run that a script starts."""

    project: str
    given: Mapping[str, Any]  # its arguments, and the variables around it that decide something


class Outcome(NamedTuple):
    """Hold what a script amounts to."""

    run: Run | None = None
    others: tuple[Run, ...] = ()  # that may be started beside it, or in its place
    perhaps: bool = False  # it starts only if a condition holds that is not known
    refused: str = ""  # why it cannot be converted
    settings: Mapping[str, Any] = {}  # of our config, by their keys
    carried: Mapping[str, Collection[str]] = {}  # arguments -> keys of settings that they decide
    open: tuple[str, ...] = ()  # arguments whose values are not known
    added: frozenset[str] = frozenset()  # words that may be any number of arguments
    around: Mapping[str, str] = {}  # variables of the environment that show something, and set nothing


def told(missed: Mapping[str, str], before: Outcome, again: Callable[[Collection[str]], Outcome]) -> Iterator[str]:
    """Yield a sentence on the variables (@: the arguments of the script) that decide something by not being given.

    `missed`: variable -> where the script asks for it. `again` reads the script as if these had values that are not
    known.
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


def _differing(before: Outcome, after: Outcome) -> list[str]:
    """Return the arguments that are open only after, and the settings that differ for another reason.

    Of a run that cannot be converted, or that may be started besides, it is the arguments that differ.
    """
    added = [_ADDED] if after.added - before.added else []
    runs = [run for run in after.others if run not in before.others]
    runs += [after.run] if after.refused and after.run else []
    named = list(dict.fromkeys(name for run in runs for name in _apart(before.run, run)))
    if after.refused:
        return [*named, *added] or [f"{_WHAT_IS_STARTED}, which is refused with it ({after.refused.splitlines()[0]})"]
    if after.perhaps and not before.perhaps:
        named.append(_WHETHER)
    elif runs and not named:
        named.append(_WHAT_IS_STARTED)
    opened = [name for name in after.open if name not in before.open]
    if before.run and after.run and before.run.project != after.run.project:  # whose defaults are others
        return [*dict.fromkeys((*named, *opened)), *added]
    theirs = {key for name in opened for key in before.carried.get(name, ())}
    every = {**before.settings, **after.settings}
    keys = [key for key in every if not _same(before.settings.get(key), after.settings.get(key)) and key not in theirs]
    every = {**before.around, **after.around}
    keys += [name for name in every if before.around.get(name) != after.around.get(name)]
    return [*dict.fromkeys((*named, *opened)), *keys, *added]


def _apart(one: Run | None, other: Run) -> list[str]:
    """Return the arguments in which two runs differ; of another project, only that."""
    if one is None or one.project != other.project:
        return [f"whether a run of {other.project} is started"]
    every = {**one.given, **other.given}
    return [name for name in every if not _same(one.given.get(name), other.given.get(name))]


def _same(one: Any, other: Any) -> bool:
    """Tell whether two values are the same, or both not known, by whatever names."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_same, one, other))
    return bool(one == other or (is_unset(one) and is_unset(other)))


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
