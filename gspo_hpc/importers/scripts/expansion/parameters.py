"""Evaluate the expansions of variables: ${name-default}, ${array[@]:1:2}, ${name#pattern} and their like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.expansion import patterns
from gspo_hpc.importers.scripts.expansion.splitting import Open, Piece, is_open
from gspo_hpc.importers.scripts.scope import ALWAYS, Scope, Unknown, Value, is_launched, is_unset

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "?": "?", "a": "\a", "b": "\b",
            "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,6}|.)", re.DOTALL)


def left(text: str) -> str:
    """Return an expression that stays as it is, as one word: a sum without its blanks, which a shell can read again."""
    if text.startswith("$((") and not re.search(r"['\"`]|[-+]\s+[-+]|\w\s+\w", text):
        return re.sub(r"\s", "", text)
    return re.sub(r"\s.*?(?=[)}]+$)", "...", text, flags=re.DOTALL) if re.search(r"\s", text) else text


def not_known(raw: str, quoted: bool) -> Piece:
    """Return an expansion that stays as it is: one word in quotes, else any number of words."""
    return Piece(left(raw), several=not quoted)


def value_piece(text: str, quoted: bool) -> Piece:
    """Return the value of a variable, in which another expansion may still stand."""
    return Piece(text, not quoted, several=not quoted and is_unset(text))


def ansi_text(text: str) -> str:
    """Return what $'...' stands for."""
    return _ESCAPED.sub(_unescaped, text)


def _unescaped(match: re.Match[str]) -> str:
    """Return what an escape in $'...' stands for."""
    text = match[1]
    if text[0] in "xuU" and len(text) > 1:
        return chr(int(text[1:], 16))
    if text[0] in "01234567":
        return chr(int(text, 8) % 256)
    return _ESCAPES.get(text, match[0])


def items_of(found: Value | None) -> tuple[str, ...]:
    """Return the elements of an array; a text is one of one element."""
    if isinstance(found, dict):
        return tuple(found.values())
    return found if isinstance(found, tuple) else (found,) if isinstance(found, str) else ()


def all_of(items: tuple[str, ...], sign: str, quoted: bool, scope: Scope) -> Iterator[Piece]:
    """Yield "${array[@]}" (a word for each), or "${array[*]}" (one word)."""
    between = scope.separators
    if sign == "*" and quoted:
        yield Piece("${IFS}" if between is None else between[:1].join(items), quoted=True)
    for number, item in enumerate(items if sign == "@" or not quoted else ()):
        several = isinstance(item, Open) or (not quoted and is_unset(item))
        yield Piece(item, not quoted, ends=number < len(items) - 1, several=several)


def never_set(name: str) -> bool:
    """Tell whether a variable that the script does not set counts as not set."""
    return re.match(r"\w", name) is not None and name not in ALWAYS and not is_launched(name)


def with_default(
    name: str, sign: str, kind: str, given: Callable[[], list[Piece]], raw: str, scope: Scope, quoted: bool
) -> Iterator[Piece]:
    """Yield ${array[@]:-default} and its like, of all elements or arguments."""
    found: Value | None = scope.arguments if name in ("@", "*") else scope.get(name)
    items = items_of(found)
    if not items:
        scope.miss(name)
    there: bool | None = bool(items)
    if kind.startswith(":") and items:
        there = True if any(item and not is_unset(item) for item in items) else None
    if isinstance(found, Unknown) or (items and is_open(items[:1])) or (found is None and name in ALWAYS):
        there = None
    if isinstance(found, dict) and len(found) > 1:  # their order is the shell's own
        there = None
    if there is None or kind not in ("-", ":-", "+", ":+"):
        yield Piece(left(raw), several=True)
    elif there != kind.endswith("+"):
        yield from all_of(items, sign, quoted, scope) if there else [Piece("", True)]
    else:
        yield from given()


def part_of(name: str, sign: str, given: str, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield ${array[@]:begin:count}, or the same of the arguments, where the first is $0."""
    found: Value | None = scope.get(name)
    if name in ("@", "*"):
        found = (scope.script, *scope.arguments)
    items = items_of(found)
    bounds = None if isinstance(found, Unknown | dict | str) else _bounds(given, items, scope)
    if bounds is None or is_open(items[: max(filter(None, bounds), default=0)]):  # passed is one that is not known
        yield Piece(left(raw), several=sign == "@" or not quoted)
        return
    yield from all_of(items[slice(*bounds)], sign, quoted, scope)


def _bounds(given: str, of: Sequence[str], scope: Scope) -> tuple[int, int | None] | None:
    """Return where the part `begin:count` of a text or of elements begins and ends, None if it is not known."""
    parts = given.split(":")
    numbers = [evaluate(part, scope) for part in parts]
    if len(parts) > 2 or "?" in given or None in numbers:
        return None
    begin, *counts = (number or 0 for number in numbers)
    if begin < 0:  # counted from the end
        begin += len(of)
        if is_open(of):
            return None
        if begin < 0:
            return 0, 0
    if not counts or counts[0] >= 0:
        return begin, begin + counts[0] if counts else None
    end = len(of) + counts[0]  # of a text, where it ends
    return (begin, end) if isinstance(of, str) and end >= begin else None


def changed_text(value: str, kind: str, given: str, scope: Scope) -> str | None:
    """Return what ${value<kind>given} makes of a value, or None where that is not known."""
    if kind in ("?", ":?"):
        return value if value or kind == "?" else None
    if kind in ("^^", ",,"):
        return None if given else value.upper() if kind == "^^" else value.lower()
    if kind == ":":
        bounds = _bounds(given, value, scope)
        return bounds and value[slice(*bounds)]
    if kind[0] == "/":
        this, _, that = given.partition("/")
        plain = not re.search(r"[*?\[\\(]|^[#%]", this) and "&" not in that
        if not plain or scope.mark("option", "nocasematch") is not False:
            return None
        return value.replace(this, that, -1 if kind == "//" else 1) if this else value
    found = patterns.compiled(given, scope.mark("option", "extglob"))
    if found is None or len(value) > 4096:
        return None
    cuts = range(len(value) + 1) if kind in ("#", "%%") else range(len(value), -1, -1)
    for cut in cuts:
        gone, kept = (value[:cut], value[cut:]) if kind[0] == "#" else (value[cut:], value[:cut])
        if found.fullmatch(gone):
            return kept
    return value
