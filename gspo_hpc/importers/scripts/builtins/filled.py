"""Find the variables that are empty, and may not be where a shell script is to go on.

Whether a file is there is not known; that no file has an empty name is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import conditions
from gspo_hpc.importers.scripts.builtins.met import Asked
from gspo_hpc.importers.scripts.conditions import plain
from gspo_hpc.importers.scripts.parse import nodes, source_of
from gspo_hpc.importers.scripts.scope import Scope

if TYPE_CHECKING:
    from tree_sitter import Node

Names = tuple[str, ...]  # of variables
_FILES = frozenset(f"-{letter}" for letter in "abcdefghkprsuwxGLNOS")  # tests that hold of a file alone
_FIRST = re.compile(r'"?\$(?:\{(\w+)(?::?-)?\}|(\w+))')
_CLASS = re.compile(r"\[[:.=]\w+[:.=]\]")  # within brackets: any sign does, since none is empty
_TURNED = re.compile(r"\\?[+?|(){}]")  # signs that mean in a basic expression what they mean escaped in an extended one
_GREP = re.compile(r"-[qsxEFGPi]+|--(?:quiet|silent|line-regexp|extended-regexp|fixed-strings|no-messages)")


def of(node: Node, holds: bool, scope: Scope) -> tuple[str, ...]:
    """Return the variables for whose emptiness a condition is not as it has to be: it holds, or it does not."""
    asked = Asked[Names | None](
        words=lambda words, met, double: _of_words(words, met, scope, double),
        joined=_joined,
        computed=lambda _, __: (),
        run=lambda command, met: _of_command(command, met, scope),
        nothing=(),
    )
    return asked.of(node, holds) or ()


def _of_command(node: Node, holds: bool, scope: Scope) -> Names:
    if node.type in ("pipeline", "command", "redirected_statement") and holds != _negated(node):
        return _searched(node, scope)
    return ()


def _joined(parts: list[tuple[str, ...] | None], every: bool) -> tuple[str, ...] | None:
    """Return what several conditions ask for of which all have to be met, or else any one."""
    if not every and () in parts:
        return ()
    found = tuple(dict.fromkeys(name for part in parts for name in part or ()))
    return found or (None if (None in parts if every else parts) else ())


def _of_words(words: list[Node], holds: bool, scope: Scope, double: bool) -> Names | None:
    """Return the variables, () where something else decides, None where it is known not to be met whatever they are."""
    if len(words) == 2 and source_of(words[0]) in _FILES:
        return _of_file(words[1], scope, double) if holds else ()
    if len(words) == 3 and source_of(words[1]) == "=~":
        quoted = words[2].type in ("string", "raw_string")
        pattern = plain(words[2], scope) if plain(words[0], scope) == "" else None
        if pattern is None or (not quoted and re.search("['\"]", source_of(words[2]))):
            return ()
        matched = _matches_nothing(re.escape(pattern) if quoted else pattern)
        return _empty(words[0], scope) if matched is not None and matched != holds else ()
    held = conditions.decided(words, scope, double)
    if held is None or held == holds:
        return ()
    return tuple(dict.fromkeys(name for word in words for name in _empty(word, scope))) or None


def _of_file(word: Node, scope: Scope, double: bool) -> tuple[str, ...]:
    """Return the variable with which the name of a file begins, where it is empty."""
    source, text = source_of(word), plain(word, scope)
    first = _FIRST.match(source)
    if first is None or text is None or (text and text[0] != "/"):
        return ()
    if not text and not double and source[0] != '"':
        return ()  # [ -d ] holds: there is no name at all
    name = first[1] or first[2]
    return (name,) if not scope.get(name) else ()


def _searched(node: Node, scope: Scope) -> tuple[str, ...]:
    """Return the variables whose text is all that a grep reads, and in which it finds nothing while they are empty."""
    inner = node
    while inner.type == "redirected_statement" and (body := inner.child_by_field_name("body")) is not None:
        inner = body
    given: list[Node]
    ends = True  # with a line, even if it is empty
    if inner.type == "pipeline":
        commands = [child for child in inner.named_children if child.type != "comment"]
        last = commands[-1].child_by_field_name("body") or commands[-1]
        first = commands[0].named_children[-1] if commands[0].type == "negated_command" else commands[0]
        if len(commands) != 2 or first.type != "command":
            return ()
        name, *given = _words(first)
        match source_of(name):
            case "echo":
                ends = not (given and source_of(given[0]) == "-n")
                given = given if ends else given[1:]
            case "printf" if len(given) > 1 and (form := plain(given[0], scope)) in ("%s", "%s\\n", "%s\n"):
                given, ends = given[1:], form != "%s"
            case _:
                return ()
    else:
        last = inner
        strings = [child for child in nodes(node) if child.type == "herestring_redirect"]
        given = strings[0].named_children if len(strings) == 1 else []
    if not given or last.type != "command" or any(plain(word, scope) != "" for word in given):
        return ()
    name, *words = _words(last)
    options = [source_of(word) for word in words[:-1]]
    if source_of(name) not in ("grep", "egrep", "fgrep") or not all(map(_GREP.fullmatch, options)) or not words:
        return ()
    if (pattern := plain(words[-1], scope)) is None or pattern.startswith("-"):
        return ()
    kind = source_of(name)[0] + "".join(options).replace("--extended-regexp", "E").replace("--fixed-strings", "F")
    if "F" in kind or kind[0] == "f":
        pattern = re.escape(pattern)
    elif not ("E" in kind or "P" in kind or kind[0] == "e"):
        pattern = _TURNED.sub(lambda sign: sign[0][1:] or f"\\{sign[0]}", pattern)
    if ends and _matches_nothing(pattern) is not False:
        return ()
    return tuple(dict.fromkeys(name for word in given for name in _empty(word, scope)))


def _negated(node: Node) -> bool:
    """Tell whether a pipeline begins with !, which the grammar counts to the first of its commands."""
    while node.type in ("pipeline", "redirected_statement"):
        node = node.named_children[0]
    return node.type == "negated_command"


def _words(command: Node) -> list[Node]:
    return [child for child in command.named_children if child.type not in ("herestring_redirect", "comment")]


def _matches_nothing(pattern: str) -> bool | None:
    """Tell whether an expression matches a text of no characters, None if that is not known."""
    try:
        return re.search(_CLASS.sub("a", pattern), "") is not None
    except (re.error, OverflowError):
        return None


def _empty(word: Node, scope: Scope) -> tuple[str, ...]:
    """Return the variables in a word that are empty."""
    found: list[str] = []
    for part in nodes(word):
        if part.type in ("simple_expansion", "expansion"):
            names = [source_of(child) for child in part.named_children[:1]]
            found += [name for name in names if re.fullmatch(r"\w+", name) and not scope.get(name)]
    return tuple(dict.fromkeys(found))
