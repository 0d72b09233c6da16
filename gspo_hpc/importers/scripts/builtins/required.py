"""Find the values that a shell script demands: a test that ends it unless a variable has one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins import filled
from gspo_hpc.importers.scripts.builtins.met import Asked
from gspo_hpc.importers.scripts.conditions import plain
from gspo_hpc.importers.scripts.parse import is_arithmetic, line_of, source_of
from gspo_hpc.importers.scripts.scope import Scope, Unknown, Value, demanded, is_unset

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

Demand = tuple["Node", bool]  # a condition, and whether it has to hold
Values = dict[str, tuple[str, ...]]  # variable or number of an argument -> the values that it may have
_SAME, _OTHER = ("=", "==", "-eq"), ("!=", "-ne")
_NAME = re.compile(r'"?\$(?:([A-Za-z_]\w*|[1-9])|\{([A-Za-z_]\w*|[1-9]\d?)(?::?-(?P<default>[\w.]*))?\})"?')
_SUM = re.compile(r"\(\(\s*\$?\{?(\w+)\}?\s*(==|!=)\s*(\d+)\s*\)\)")
_PATTERN = re.compile(r"[*?\[(\\]")


def of(demands: Iterable[Demand], scope: Scope) -> Values:
    """Return the values that variables have where each condition holds, or does not, as it has to."""
    return _both(_of(node, holds, scope) for node, holds in demands)


def hold(reader: Reader, demands: Iterable[Demand], before: Mapping[str, Value]) -> None:
    """Set what is not known, and has to have one value where the script goes on; `before`: as it was tested."""
    scope = reader.scope
    demands = [*demands]
    for name, values in of(demands, scope).items():
        held = scope.get(name)
        same = name.isdecimal() or scope.values.get(name) is before.get(name)  # not set again, to an equal text say
        if len(values) == 1 and same and (held is None or isinstance(held, Unknown) or is_unset(held)):
            give(reader, name, values[0], line_of(demands[0][0]))
    fill(reader, demands, before)


def fill(reader: Reader, demands: Iterable[Demand], before: Mapping[str, Value]) -> None:
    """Set what is empty, and may not be where the script goes on, to what is not known: a run is given it."""
    scope = reader.scope
    for node, holds in demands:
        for name in filled.of(node, holds, scope):
            source = name
            if name.isdecimal():
                source = _passed(reader, int(name)) if reader.frames else ""
                if any(frame and source in frame for frame in reader.frames):
                    continue  # a local variable hides it
            if source and not scope.get(source) and scope.values.get(source) == before.get(source):
                scope.set(source, demanded(line_of(node)))


def errexit(reader: Reader, node: Node, status: bool | None) -> None:
    """Set what a test by itself demands that ends the script if it fails (set -e); end it at another that has failed.

    A function ends with the status of its last command, also of a list that ends nothing by itself.
    """
    alone = node.parent is not None and node.parent.type == "program" and not reader.frames
    if not alone or not reader.scope.mark("option", "errexit"):
        return
    body = node.child_by_field_name("body") if node.type == "redirected_statement" else node
    if _tests(node) and node.type not in ("negated_command", "list"):
        hold(reader, [(node, True)], reader.scope.values)
    elif status is False and reader.certain and reader.exits and not reader.ended and body is not None:
        if body.type in ("command", "subshell") or (body.type == "compound_statement" and is_arithmetic(body)):
            reader.ended = "exit"
            reader.exit_place = reader.exit_place or f"{reader.scope.place} (set -e)"


def ends(reader: Reader, loop: Node, body: Node, before: Mapping[str, Value]) -> bool:
    """Tell whether a loop that ends the script is passed with other variables, which are set to what is not known."""
    given = [child for child in loop.named_children if child.start_byte < body.start_byte and child.type != "comment"]
    was = reader.scope.values
    if len(given) == 1:
        reader.scope.values = dict(before)
        fill(reader, [(given[0], loop.children[0].type == "until")], before)
        if reader.scope.values != before:
            return True
        reader.scope.values = was
    return False


def give(reader: Reader, name: str, value: str, line: int) -> None:
    """Set a variable, or an argument of the script, to the value without which the script ends; note that."""
    scope = reader.scope
    held = scope.get(name)
    behind = _NAME.fullmatch(held) if isinstance(held, str) else None  # $1 or local n=$1 in f "$N", with N not known
    if name.isdecimal() and not reader.frames:
        number = int(name)
        given = [*scope.arguments, *(f"${place}" for place in range(len(scope.arguments) + 1, number + 1))]
        scope.arguments = (*given[: number - 1], value, *given[number:])
    elif not name.isdecimal():
        scope.set(name, value)
        if held is None:  # of whoever starts it
            scope.put_mark("export", name, True)
    source = "" if behind is None else behind[1] or behind[2]
    if name.isdecimal() and reader.frames:
        source = _passed(reader, int(name)) or source
    hidden = any(frame and source in frame for frame in reader.frames)
    known = scope.get(source) if source else None
    if source and not hidden and source != name and (not isinstance(known, str) or is_unset(known)):
        give(reader, source, value, line)
    elif not (name.isdecimal() and reader.frames):
        reader.required.append(f"${name} is taken to be {value}: line {line} ends the script with any other value")


def _passed(reader: Reader, number: int) -> str:
    """Return the variable that the present call gives the function as an argument, "" if it is none."""
    call, given = reader.callers[-1] if reader.callers else None, reader.scope.arguments[number - 1 : number]
    words = [] if call is None else call.named_children[number : number + 1]
    source = variable(words[0]) if words else ""
    return source if source and given == (reader.scope.get(source),) else ""


def variable(node: Node) -> str:
    """Return the variable whose value a word is, "" if it is anything else."""
    name = _NAME.fullmatch(source_of(node))
    return "" if name is None else name[1] or name[2]


def _of(node: Node, holds: bool, scope: Scope) -> Values:
    inner = node
    while inner.type == "negated_command":
        inner = inner.named_children[-1]
    if inner.type == "list" and not _tests(inner):
        return {}
    asked = Asked[Values](
        words=lambda words, met, double: _of_words(words, met, scope, double),
        joined=_joined,
        computed=_computed,
        run=lambda _, __: {},
        nothing={},
    )
    return asked.of(node, holds)


def _computed(node: Node, holds: bool) -> Values:
    found = _SUM.fullmatch(source_of(node))
    return {found[1]: (found[3],)} if found and holds == (found[2] == "==") else {}


def _tests(node: Node) -> bool:
    """Tell whether a command only tests, and changes no variable."""
    if node.type in ("negated_command", "list"):
        return all(_tests(child) for child in node.named_children)
    return node.type == "test_command" or (node.type == "command" and source_of(node.children[0]) == "test")


def _of_words(words: list[Node], holds: bool, scope: Scope, double: bool) -> Values:
    """Return what the words of a test demand. `double`: they stand in [[ ]]."""
    return _compared(words[0], source_of(words[1]), words[2], holds, scope, double) if len(words) == 3 else {}


def _compared(left: Node, sign: str, right: Node, holds: bool, scope: Scope, double: bool) -> Values:
    """Return what a comparison demands: the value on the one side, of the variable on the other."""
    if sign not in (_SAME if holds else _OTHER):
        return {}
    for one, other in ((left, right), (right, left)):
        name = _NAME.fullmatch(source_of(one))
        value = plain(other, scope) if name else None
        if name is None or value is None or value == (name["default"] or ""):  # it may be empty, too
            continue
        held = scope.get(name[1] or name[2])
        if isinstance(held, str) and held and not is_unset(held) and _NAME.fullmatch(source_of(other)):
            continue  # either of two variables may be another one in a run
        if sign.startswith("-") and not re.fullmatch(r"[1-9]\d{0,17}|0", value):
            continue
        if double and not sign.startswith("-") and other is right and other.type not in ("string", "raw_string"):
            if _PATTERN.search(value) or scope.mark("option", "nocasematch") is not False:
                continue
        return {name[1] or name[2]: (value,)}
    return {}


def _joined(parts: list[Values], every: bool) -> Values:
    """Return what several conditions demand of which all have to be met, or else any one."""
    if every:
        return _both(parts)
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: tuple(dict.fromkeys(value for part in parts for value in part[name])) for name in names}


def _both(parts: Iterable[Values]) -> Values:
    found: Values = {}
    for part in parts:
        for name, values in part.items():
            kept = tuple(value for value in values if value in found.get(name, values))
            found[name] = kept or values  # none: it never goes on
    return found
