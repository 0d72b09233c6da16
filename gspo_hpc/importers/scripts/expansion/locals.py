"""Follow the first lines of a function whose output is used, where they set variables of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.parse import source_of
from gspo_hpc.importers.scripts.scope import ALWAYS, Reference, Scope, is_unset

if TYPE_CHECKING:
    from tree_sitter import Node

_SET = re.compile(r"([A-Za-z_]\w*)=")  # a whole variable
_BRACES = re.compile(r"(?<!\$)\{")  # {a,b} makes two words of such an assignment
_DECLARE = ("local", "declare", "typeset")


def after_locals(lines: list[Node], scope: Scope, text_of: Callable[[Node, Scope], str]) -> list[Node]:
    """Return the lines of a function without its first ones of `local NAME=...`, whose variables are set.

    A line is kept, and nothing can be made of the function, where it does more or a value in it is not known.
    """
    while len(lines) > 1 and lines[0].type == "declaration_command":
        found = _values(lines[0], scope, text_of)
        if not found or any(map(is_unset, found.values())):
            return lines
        scope.values.update(found)  # bash expands all of them before it sets the first
        lines = lines[1:]
    return lines


def _values(line: Node, scope: Scope, text_of: Callable[[Node, Scope], str]) -> dict[str, str]:
    """Return the variables that a line declares, empty where it does more than to give each a text."""
    found: dict[str, str] = {}
    command = line.children[0].type
    if command not in _DECLARE or command in scope.shadowed:
        return {}
    for child in line.named_children:
        match = _SET.match(source_of(child)) if child.type == "variable_assignment" else None
        value = child.named_children[1] if match and len(child.named_children) > 1 else None
        if match is None or _is_more(match[1], scope) or (value and (value.type == "array" or _braced(value))):
            return {}
        found[match[1]] = "" if value is None else text_of(value, scope)
    return found


def _braced(value: Node) -> bool:
    return _BRACES.search(source_of(value)) is not None


def _is_more(name: str, scope: Scope) -> bool:
    """Tell whether a variable is more than a text: a number, the name of another one, or read by the shell itself."""
    declared = any(scope.mark(kind, name) is not False for kind in ("integer", "letters", "readonly"))
    return declared or name in ALWAYS or isinstance(scope.values.get(name), Reference)
