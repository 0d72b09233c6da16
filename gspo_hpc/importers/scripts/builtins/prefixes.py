"""Take off what stands before a command: env with its options, exec, nohup and their like, and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins import folders
from gspo_hpc.importers.scripts.scope import is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

_PREFIXES = ("exec", "time", "env", "nohup", "command", "builtin")
_OUTSIDE = ("exec", "env", "nohup", "command", "builtin")  # a program is started, whatever functions there are
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VALUED = re.compile(r"(?:-u|--unset|-C|--chdir)")  # options of env with a value
_ATTACHED = re.compile(r"(?:-[uC]|--(?:unset|chdir)=)(.+)", re.DOTALL)
_PLAIN = re.compile(r"-[iv0]+|-|--ignore-environment|--null|--debug|--(?:block|default|ignore)-signal(?:=.*)?")


def stand(words: list[str]) -> bool:
    """Tell whether something stands before a command that is taken off."""
    if not words:
        return False
    return _ASSIGNMENT.match(words[0]) is not None or words[0].rpartition("/")[2] in _PREFIXES


@contextmanager
def not_yet(reader: Reader) -> Iterator[None]:
    """Have the variables without those that stand before the present command, which its words and input do not see."""
    values = reader.scope.values
    if reader.around is not None:
        reader.scope.values = dict(reader.around)
    yield
    reader.scope.values = values


def taken_off(reader: Reader, words: list[str], given: set[str]) -> tuple[list[str], bool, bool]:
    """Return the words of a command without what stands before it, which is followed.

    Variables that the command sees otherwise than the script are set, or unset, and added to `given`. Also returned:
    whether a program is started in any case, and whether it takes the script's place.
    """
    scope, words = reader.scope, list(words)
    outside = ends = False
    while stand(words):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            given.add(name)
            scope.set(name, value)
            scope.put_mark("export", name, True)
            continue
        name = name.rpartition("/")[2]
        outside, ends = outside or name in _OUTSIDE, ends or name == "exec"
        if name == "env":
            words = _without_options(reader, words, given)
    return words, outside, ends


def _without_options(reader: Reader, words: list[str], given: set[str]) -> list[str]:
    """Return the words behind the options of env; variables that it takes away are unset."""
    while words and words[0].startswith("-"):
        if words[0] == "--":
            return words[1:]
        if _VALUED.fullmatch(words[0]) and len(words) > 1:
            option, value, words = words[0], words[1], words[2:]
        elif match := _ATTACHED.fullmatch(words[0]):
            option, value, words = words[0], match[1], words[1:]
        elif _PLAIN.fullmatch(words[0]):
            option, value, words = words[0], "", words[1:]
            if option == "-" or option == "--ignore-environment" or (option[1] != "-" and "i" in option):
                _take_away(reader, [*reader.scope.values, *reader.scope.batch], given)
            continue
        else:
            break  # a form that is not followed, such as -S
        if option.startswith(("-u", "--u")) and is_unset(value):
            reader.scope.lose_all("may be taken away by env, where the variable's name is not known", sets=False)
            given.update(filter(str.isidentifier, reader.scope.values))
        elif option.startswith(("-u", "--u")):
            _take_away(reader, [value], given)
        elif option.startswith(("-C", "--c")):
            folders.enter(reader.scope, "cd", [value])
            given.add(folders.KEY)
    return words


def _take_away(reader: Reader, names: list[str], given: set[str]) -> None:
    """Unset variables for one command."""
    scope = reader.scope
    for name in filter(str.isidentifier, names):
        given.add(name)
        scope.values.pop(name, None)
        scope.values.pop(f"export {name}", None)
    scope.batch = {name: value for name, value in scope.batch.items() if name not in given}
