"""Follow set and shopt, by which a shell script changes how the rest of it is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.scope import REST, is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

_LETTERS = {"a": "allexport", "f": "noglob", "e": "errexit", "u": "nounset"}
_NAMED = ("allexport", "pipefail", "noglob", "errexit", "nounset")
# Options that change nothing of what is followed here.
_HARMLESS_LETTERS = set("xvhbmCETHPB")
_HARMLESS = set(
    "xtrace verbose hashall notify monitor noclobber errtrace functrace histexpand history physical "
    "braceexpand ignoreeof interactive-comments nolog emacs vi".split()
)
_SHOPT = ("extglob", "nocasematch", "expand_aliases")
_HARMLESS_SHOPT = set(
    "autocd cdable_vars cdspell checkhash checkjobs checkwinsize cmdhist complete_fullquote direxpand dirspell dotglob "
    "execfail failglob force_fignore globasciiranges globskipdots globstar gnu_errfmt histappend histreedit histverify "
    "hostcomplete huponexit inherit_errexit interactive_comments lastpipe lithist login_shell mailwarn "
    "no_empty_cmd_completion nocaseglob nullglob progcomp progcomp_alias promptvars restricted_shell shift_verbose "
    "sourcepath".split()
)


def set_command(reader: Reader, rest: list[str], line: int) -> None:
    """Follow ``set``: options, and the arguments that are set."""
    scope = reader.scope
    words = list(rest)
    while words:
        word = words[0]
        if isinstance(word, Open) or is_unset(word):
            _replace(reader, (REST,))
            scope.put_mark("option", "allexport", None)
            return
        if word in ("--", "-"):
            if word == "--" or words[1:]:
                _replace(reader, words[1:])
            return
        if word[0:1] not in ("-", "+"):
            _replace(reader, words)
            return
        words.pop(0)
        for letter in word[1:]:
            if letter == "o":
                if words:
                    _option(reader, words.pop(0), word[0] == "-", line)
            elif letter in _LETTERS:
                scope.put_mark("option", _LETTERS[letter], word[0] == "-")
            elif letter not in _HARMLESS_LETTERS:
                raise ValueError(f"line {line}: set {word[0]}{letter} changes how a script is read; take it out")


def _replace(reader: Reader, words: Iterable[str]) -> None:
    """Set the arguments; those of a file that is sourced stay so for its caller, unless that is a function."""
    reader.scope.arguments = tuple(words)
    reader.scope.reset = reader.scope.reset or all(frame is None for frame in reader.frames)


def _option(reader: Reader, name: str, on: bool, line: int) -> None:
    if name in _NAMED:
        reader.scope.put_mark("option", name, on)
    elif name not in _HARMLESS:
        raise ValueError(f"line {line}: set -o {name} changes how a script is read; take it out")


def shopt(reader: Reader, rest: list[str], line: int) -> None:
    """Follow ``shopt``."""
    flags = "".join(word[1:] for word in rest if word.startswith("-"))
    names = [word for word in rest if not word.startswith("-")]
    if not set(flags) & set("su"):
        return
    for name in names:
        if "o" in flags:
            _option(reader, name, "s" in flags, line)
        elif name in _SHOPT:
            reader.scope.put_mark("option", name, "s" in flags)
        elif name not in _HARMLESS_SHOPT:
            raise ValueError(f"line {line}: shopt {name} changes how a script is read; take it out")
    if "lastpipe" in names:
        reader.last_apart = "s" not in flags if reader.certain else None
