"""Take the defaults that a script gives its variables in two steps, as those in one step (``${X:-8}``) are taken.

It matters where a script is read as if variables had been given that it does not set: a default stands in it for those.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.expansion.parameters import never_set
from gspo_hpc.importers.scripts.expansion.splitting import Absent
from gspo_hpc.importers.scripts.parse import source_of
from gspo_hpc.importers.scripts.scope import Scope, Unknown
from gspo_hpc.importers.scripts.words import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_VALUE = r"""["']?\$(?:(\w+)|\{(\w+)(?::?[-=](?:""|'')?)?\})["']?"""
_SAME = re.compile(_VALUE)
_NOTHING = r"""(?:""|'')"""
_EMPTY = re.compile(rf"""\[\[?\s+(?:(?:-z|!\s+-n|!)\s+{_VALUE}|{_VALUE}\s+==?\s+{_NOTHING})\s+\]\]?""")
_FILLED = re.compile(rf"""\[\[?\s+(?:(?:-n\s+|!\s+-z\s+)?{_VALUE}|{_VALUE}\s+!=\s+{_NOTHING})\s+\]\]?""")


def handed_on(scope: Scope, given: Node | None) -> Unknown | Absent | None:
    """Return what whoever starts the script may give, or nothing, where a value is that alone: ``$1``, ``"${X:-}"``."""
    match = _SAME.fullmatch(source_of(given)) if given is not None else None
    if given is None or match is None:
        return None
    name = match[1] or match[2]
    if scope.mark("option", "nounset") is not False and not re.search(r"[-=]", match[0]):
        return None  # a run has to be given it
    if presumed := _presumed(scope, name):
        return presumed
    held, text = scope.held(name), text_of(given, scope)
    empty = isinstance(held, Absent) or (held is None and never_set(name))
    return Absent(text) if text and empty else None


def _presumed(scope: Scope, name: str) -> Unknown | None:
    held = scope.held(name)
    return held if isinstance(held, Unknown) and held.why in scope.presumed else None


def follow(reader: Reader, node: Node) -> bool:
    """Follow a statement that only gives a variable a default (``[ -z "$X" ] && X=8``), and tell whether it does.

    The variable is one that whoever starts the script may give.
    """
    if not reader.scope.presumed:
        return False
    parts = [child for child in node.children if child.type != "comment"]
    if node.type == "list" and len(parts) == 3:
        pattern, body = _EMPTY if parts[1].type == "&&" else _FILLED, [parts[2]]
        condition = parts[:1]
    elif node.type == "if_statement" and any(child.type == "then" for child in parts):
        then = next(at for at, child in enumerate(parts) if child.type == "then")
        pattern, body = _EMPTY, [child for child in parts[then + 1 :] if child.is_named]
        condition = [child for child in parts[:then] if child.is_named]
    else:
        return False
    match = pattern.fullmatch(source_of(condition[0])) if len(condition) == 1 else None
    name = next(filter(None, match.groups()), "") if match else ""
    if not name.isidentifier() or _presumed(reader.scope, name) is None or {*map(_set_by, body)} != {name}:
        return False
    reader.walk(body)
    return True


def _set_by(node: Node) -> str:
    """Return the variable that a statement sets, "" if it is anything else or sets several."""
    if node.type == "declaration_command":
        inner = [child for child in node.named_children if child.type != "comment"]
        return _set_by(inner[0]) if len(inner) == 1 and source_of(node.children[0]) == "export" else ""
    return source_of(node.named_children[0]) if node.type == "variable_assignment" else ""
