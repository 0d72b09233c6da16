"""Evaluate the conditions of a shell script: true, false, or None where only running it would tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.parse import source_of
from gspo_hpc.importers.scripts.places import there
from gspo_hpc.importers.scripts.scope import Scope, Unknown, is_unset
from gspo_hpc.importers.scripts.words import text_of

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


def plain(node: Node, scope: Scope) -> str | None:
    """Return the text of a word in a condition, None if it is not known; a variable that is not set is empty."""
    scope.empty = True
    text = text_of(node, scope)
    scope.empty = False
    return None if is_unset(text) else text


def holds(node: Node, scope: Scope, double: bool) -> bool | None:
    """Tell whether a test holds, None if that is not known. `double`: it stands in [[ ]]."""
    parts = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "(", ")")]
    if node.type == "binary_expression" and len(parts) == 3:
        sign = source_of(parts[1])
        if sign in ("&&", "||", "-a", "-o"):
            sides = [holds(parts[0], scope, double), holds(parts[2], scope, double)]
            ends = sign in ("||", "-o")  # the outcome of one side that decides
            return ends if ends in sides else None if None in sides else not ends
        negated = parts[0].type == "unary_expression"  # ! binds tighter in the grammar than in bash
        left, right = plain(parts[0].children[-1] if negated else parts[0], scope), plain(parts[2], scope)
        if left is None or right is None:
            return None
        held = compare(left, sign, right, double and parts[2].type not in ("string", "raw_string"))
        return None if held is None else held != negated
    if node.type == "unary_expression" and len(parts) == 2:
        sign = source_of(parts[0])
        if sign == "!":
            inner = holds(parts[1], scope, double)
            return None if inner is None else not inner
        text = plain(parts[1], scope)
        if sign == "-v" and text is not None:
            found = scope.get(text)
            return None if isinstance(found, Unknown) else found is not None
        if sign in ("-f", "-e", "-r", "-s") and text is not None:
            return there(text, scope.script)
        return None if text is None or sign not in ("-z", "-n") else (sign == "-z") == (not text)
    if node.type in ("test_command", "parenthesized_expression"):
        return holds(parts[0], scope, double) if len(parts) == 1 else None
    text = plain(node, scope)
    return None if text is None else bool(text)


def compare(left: str, sign: str, right: str, pattern: bool = False) -> bool | None:
    """Tell whether a comparison holds, None if that is not known. `pattern`: the right side is one, as in [[ ]]."""
    if is_unset(left) or is_unset(right):
        return None
    if sign in ("=", "==", "!="):
        same = fnmatchcase(left, right) if pattern else left == right
        return None if pattern and "(" in right else same == (sign != "!=")
    whole = re.compile(r"\s*[-+]?\d{1,18}\s*")
    if sign in _NUMBERS and whole.fullmatch(left) and whole.fullmatch(right):
        return _NUMBERS[sign](int(left), int(right))
    return None
