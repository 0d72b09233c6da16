"""Follow the folder in which a script's commands run: cd, pushd and popd."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from gspo_hpc.importers.scripts.scope import Scope, Unknown, Value, is_unset

KEY = "folder of commands"  # among the values of a scope, as a name that no variable can have
_OPTIONS = ("-L", "-P", "-e", "-@", "--")


def enter(scope: Scope, name: str, rest: Sequence[str]) -> None:
    """Follow cd or one of its like; relative to a folder that is not known, only an absolute one is known again."""
    scope.values.pop("PWD", None)
    scope.values.pop("OLDPWD", None)
    scope.values[KEY] = _after(scope.values.get(KEY, ""), name, [word for word in rest if word not in _OPTIONS])


def _after(before: Value, name: str, words: Sequence[str]) -> Value:
    to = words[0] if len(words) == 1 and name != "popd" else "-"
    if is_unset(to) or to.startswith(("-", "+", "~")):
        return Unknown("is not known before the script runs")
    if os.path.isabs(to) or isinstance(before, str):
        return os.path.normpath(os.path.join(before if isinstance(before, str) else "", to))
    return before


def of_commands(scope: Scope) -> str:
    """Return the folder, relative to that in which the script was started; "" for that one, and if it is not known."""
    held = scope.values.get(KEY, "")
    return held if isinstance(held, str) and held != "." else ""
