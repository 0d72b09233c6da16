"""Evaluate the conditions of a shell script: true, false, or None where only running it would tell."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.expansion.patterns import escaped, matches
from gspo_hpc.importers.scripts.expansion.splitting import is_open
from gspo_hpc.importers.scripts.parse import source_of
from gspo_hpc.importers.scripts.places import there
from gspo_hpc.importers.scripts.scope import ALWAYS, SURE, Scope, Unknown, is_launched, is_unset
from gspo_hpc.importers.scripts.words import pattern_of, text_of, words_of

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}

_EQUAL = ("=", "==", "!=")
# Without a value on one side [ ] is an error, and so false. -ne and != hold then in what a script is meant to do.
_FAILING = frozenset((*_NUMBERS, *_EQUAL)) - {"-ne", "!="}
# What the two kinds of expressions read otherwise: alternatives, escapes, quotes, classes, repeated groups.
_NOT_ALIKE = re.compile(r"""[|\\'"]|\[[.:=]|\)[*+?{]|\(\?|[*+?}][*+?]""")
_SPLIT = ("simple_expansion", "expansion", "command_substitution")  # without quotes: no word in brackets where empty

# Functions that start-up files of a shell or a site define.
_OF_SITES = re.compile(r"_?(?:module|ml|conda|mamba|micromamba|deactivate|spack|pyenv|nvm|load\w*)|_\w+")

_TESTS = ("test_command", "negated_command", "((")  # types of commands that ask something
_GROUPS = ("subshell", "compound_statement", "redirected_statement", "pipeline")  # succeed as what is in them
_GIVES_UP = re.compile(r"[\s({]*(?:exit|return|true|false|:|echo|printf|continue|break|die|fail|error|warn)\b|[\s({]*:")


def _text(node: Node, scope: Scope) -> str:
    """Return the text of a word in a condition, in which expansions may be left; what is not set is empty."""
    scope.empty = True
    text = text_of(node, scope)
    scope.empty = False
    return text


def _is_some(text: str) -> bool | None:
    """Tell whether a text is more than nothing, None if that is not known: one with a letter before its first $ is."""
    return None if is_unset(text) and text[0] in "$`" else bool(text)


def plain(node: Node, scope: Scope) -> str | None:
    """Return the text of a word in a condition, None if it is not known; a variable that is not set is empty."""
    text = _text(node, scope)
    return None if is_unset(text) else text


def plain_pattern(node: Node, scope: Scope) -> str | None:
    """Return a word in a condition as a pattern, None if it is not known."""
    scope.empty = True
    text = pattern_of(node, scope)
    scope.empty = False
    return None if is_unset(text) else text


def holds(node: Node, scope: Scope, double: bool) -> bool | None:
    """Tell whether a test holds, None if that is not known. `double`: it stands in [[ ]]."""
    parts = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "(", ")")]
    if node.type == "test_command" and node.children[0].type == "[":
        words = [leaf for part in parts for leaf in leaves(part)]
        if any(word.type in _SPLIT and len(words_of(word, scope)) > 1 for word in words):
            return None  # a value with blanks and without quotes
        return _joined([word for word in words if word.type not in _SPLIT or plain(word, scope) != ""], scope)
    if double:
        return _in_double([leaf for part in parts for leaf in leaves(part)], scope)
    return _is_some(_text(node, scope))


def _in_double(words: list[Node], scope: Scope) -> bool | None:
    """Tell whether the words in [[ ]] hold: && binds tighter than ||, which the grammar does not know beside =."""
    for sign in ("||", "&&"):
        if len(parts := split_at(words, sign)) > 1:
            return _decided([_in_double(part, scope) for part in parts], one=sign == "||")
    if words and source_of(words[0]) == "!":
        inner = _in_double(words[1:], scope)
        return None if inner is None else not inner
    if len(words) == 1 and words[0].type == "parenthesized_expression":
        return holds(words[0], scope, True)
    if len(words) == 1:
        return _is_some(_text(words[0], scope))
    if len(words) == 2:
        return _unary(source_of(words[0]), words[1], scope)
    if len(words) != 3:
        return None
    sign = source_of(words[1])
    left = _text(words[0], scope)
    if sign == "=~":
        return matched(left, words[2], scope)
    if sign not in _EQUAL:
        return compare(left, sign, _text(words[2], scope), scope, double=True)
    right = plain_pattern(words[2], scope)
    if is_unset(left) or right is None:
        return sign == "!=" if right == "" and _is_some(left) else None
    held = fits(left, right, scope, True)
    return None if held is None else held == (sign != "!=")


def matched(left: str, word: Node, scope: Scope) -> bool | None:
    """Tell whether a text matches a regular expression, None if that is not known; sets BASH_REMATCH.

    Expressions are followed in which Python and POSIX agree on what each part matches.
    """
    scope.set("BASH_REMATCH", "")  # is not known
    right = _text(word, scope)
    plain_text = left and not is_unset(left) and not is_unset(right) and not _by_path(left, right, scope)
    if not plain_text or scope.mark("option", "nocasematch") is not False:
        return None
    if word.type in ("string", "raw_string"):
        right = re.escape(right)
    elif _NOT_ALIKE.search(source_of(word)) or _NOT_ALIKE.search(right):
        return None
    try:
        expression = re.compile(right)
    except (re.error, OverflowError):
        return None
    found = expression.search(left)
    if found and any(expression.fullmatch(left, found.start(), end) for end in range(found.end() + 1, len(left) + 1)):
        return None  # the longest counts there
    scope.values["BASH_REMATCH"] = tuple(text or "" for text in (found[0], *found.groups())) if found else ()
    return found is not None


def decided(words: list[Node], scope: Scope, double: bool) -> bool | None:
    """Tell whether a test of these words holds, None if that is not known. `double`: they stand in [[ ]]."""
    return _in_double(words, scope) if double else _joined(words, scope)


def split_at(words: list[Node], sign: str) -> list[list[Node]]:
    """Return the words of a condition between those that are an operator."""
    parts: list[list[Node]] = [[]]
    for word in words:
        if source_of(word) == sign:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _sides(words: list[Node], sign: str) -> list[list[Node]]:
    """Return the words in [ ] between those that are -a or -o; with nothing before them, these are other tests."""
    parts: list[list[Node]] = [[]]
    for at, word in enumerate(words):
        before = source_of(words[at - 1]) if at else ""
        unary = at + 1 < len(words) and (before in ("-a", "-o") or (before == "!" and len(words) > 3))
        if at and source_of(word) == sign and not unary:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _decided(outcomes: list[bool | None], *, one: bool) -> bool | None:
    """Return what several outcomes amount to where `one`, true or false, decides by itself; None if that is open."""
    return one if one in outcomes else None if None in outcomes else not one


def leaves(node: Node) -> Iterator[Node]:
    """Yield the words of a condition, which the grammar groups otherwise than bash does."""
    if node.type in ("binary_expression", "unary_expression", "ERROR"):
        for child in node.children:
            yield from leaves(child)
    else:
        yield node


def _joined(words: list[Node], scope: Scope) -> bool | None:
    """Tell whether the words in brackets hold: -a binds tighter than -o. None for words that bash makes nothing of."""
    for sign in ("-o", "-a"):
        if len(parts := _sides(words, sign)) > 1:
            return _decided([_joined(part, scope) for part in parts], one=sign == "-o")
    if words and source_of(words[0]) == "!":
        inner = _joined(words[1:], scope)
        return None if inner is None else not inner
    if len(words) == 1 and words[0].type == "parenthesized_expression":
        return _joined([leaf for part in words[0].children[1:-1] for leaf in leaves(part)], scope)
    if len(words) < 2:
        return _is_some(_text(words[0], scope)) if words else False
    if len(words) == 2:
        sign = source_of(words[0])
        return False if sign in _FAILING else _unary(sign, words[1], scope)  # nothing stands before it
    if len(words) != 3:
        return None
    return compare(_text(words[0], scope), source_of(words[1]), _text(words[2], scope), scope)


def is_test(node: Node) -> bool:
    """Tell whether a command before && asks something. Commands that all have to succeed, `a && b`, ask nothing."""
    if node.type in _TESTS:
        return True
    if node.type == "command":
        name = node.child_by_field_name("name")
        return name is not None and os.path.basename(source_of(name)) == "test"
    if node.type != "list":
        inner = node.type in _GROUPS
        return any(is_test(part) if inner else part.type in (*_TESTS, "list") for part in node.children)
    first, sign, last = (child for child in node.children if child.type != "comment")
    if sign.type == "||":  # behind `a || exit 1`, too, what goes on has succeeded
        return is_test(first) or _GIVES_UP.match(source_of(last)) is None
    return is_test(first) or is_test(last)


def otherwise(node: Node) -> bool:
    """Tell whether `a && b` stands in `a && b || c`, where c is more than an end or a message."""
    around = node.parent
    if around is None or around.type != "list" or around.children[0].id != node.id or around.children[1].type != "||":
        return False
    return _GIVES_UP.match(source_of(around.children[-1])) is None


def _unary(sign: str, word: Node, scope: Scope) -> bool | None:
    """Tell whether a test of one word holds, None if that is not known."""
    given = _text(word, scope)
    text = None if is_unset(given) else given
    if sign == "-v" and text is not None:
        if "[" in text:  # an element of an array
            return None
        return is_set(text, scope)
    if sign in ("-a", "-f", "-e", "-r", "-s") and text is not None:
        return there(text, scope.script)
    some = _is_some(given) if sign in ("-z", "-n") else None
    return None if some is None else some == (sign == "-n")


def is_set(name: str, scope: Scope) -> bool | None:
    """Tell whether a variable is set, of an array whether its element 0 is; None where that is not known."""
    held = scope.get(name)
    if held is None and (name in ALWAYS or is_launched(name)):
        return True if name in SURE else None
    if isinstance(held, Unknown):
        return None
    if isinstance(held, tuple):
        return None if is_open(held[:1]) else bool(held)
    return "0" in held if isinstance(held, dict) else held is not None


def are_declared(names: Iterable[str], scope: Scope) -> bool | None:
    """Tell whether all of these variables are declared, as declare -p asks; None where that is not known."""
    return _decided([_is_declared(name, scope) for name in names], one=False)


def _is_declared(name: str, scope: Scope) -> bool | None:
    """Tell whether a variable is declared, be it without a value (``declare -i N``, ``export N``)."""
    if isinstance(scope.get(name), tuple | dict):  # also one without any element
        return True
    found = is_set(name, scope)
    return None if found is False and any(key.endswith(f" {name}") for key in scope.values) else found


def are_functions(names: Iterable[str], functions: Mapping[str, Node | None], scope: Scope) -> bool | None:
    """Tell whether all of these names are functions, as declare -F asks; None where that is not known.

    What sets up a shell or a site, and a file that is not read, may have defined one.
    """
    lost = bool(scope.sourced)
    here = [functions[name] is not None or None if name in functions else None if lost or _OF_SITES.fullmatch(name)
            else False for name in names]  # fmt: skip
    return _decided(here, one=False)


def fits(text: str, pattern: str, scope: Scope, extended: bool | None) -> bool | None:
    """Tell whether a text matches a pattern, as in case and [[ ]]; None if that is not known."""
    any_case = scope.mark("option", "nocasematch")
    return None if _by_path(text, pattern, scope) else matches(text, pattern, extended, any_case)


def _by_path(text: str, pattern: str, scope: Scope) -> bool:
    """Tell whether a text matches a pattern by one path of a script alone, and a script may be started by any.

    It always ends with the script's name, and so do others that are made of it, with theirs.
    """
    plain = re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL)
    files = (scope.script, scope.main, scope.here or "")
    for folder in sorted(filter(None, map(os.path.dirname, files)), key=len, reverse=True):
        if folder in text and folder in plain:
            return False
        if folder in plain:
            text, pattern = plain, escaped(text)
        if folder in text and pattern:
            first, _, rest = text.partition(folder)
            pattern = pattern.removeprefix(escaped(first))
            if pattern[:1] == "*":
                ways = (folder + rest, f".{rest}", rest.removeprefix("/"))
                return len({matches(way, pattern, True, False) for way in ways}) > 1
            tail = re.sub(r"\\(.)", r"\1", re.split(r"(?<!\\)[*?\])]", pattern)[-1])
            return rest.endswith(tail) or tail.endswith(rest)
    return False


def compare(left: str, sign: str, right: str, scope: Scope, double: bool = False) -> bool | None:
    """Tell whether a comparison holds, None if that is not known. `double`: it stands in [[ ]], and computes."""
    if is_unset(left) or is_unset(right):
        other = left if right == "" else right if left == "" else ""
        return sign == "!=" if sign in _EQUAL and _is_some(other) else None
    if sign in _EQUAL:
        return None if _by_path(left, escaped(right), scope) else (left == right) == (sign != "!=")
    if sign in _NUMBERS and "" in (left, right):
        if not double:
            return False if sign in _FAILING else None
        left, right = left or "0", right or "0"
    whole = re.compile(r"\s*[-+]?\d{1,18}\s*")
    if sign in _NUMBERS and whole.fullmatch(left) and whole.fullmatch(right):
        if double and any(re.match(r"\s*[-+]?0\d", text) for text in (left, right)):
            return None  # of base 8 there
        return _NUMBERS[sign](int(left), int(right))
    return None
