"""Turn the words of a parsed shell script into text, as far as the script alone says what they are.

Nothing is executed. What depends on the world outside the script (a command's output, a variable that is never set)
stays in the text as it is written, ``$NAME`` or ``$(command...)``, so that :func:`is_unset` recognises it later.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.importers.parse import source_of

if TYPE_CHECKING:  # the parser is imported by read_script alone
    from tree_sitter import Node

_LEFT = re.compile(r"\$(?:[A-Za-z_{(]|\d)")
_HEAD = re.compile(rb"([#!]?)([A-Za-z_]\w*|\d+|[@*#])(?:\[([^\]]*)\])?")
_OPERATOR = re.compile(rb":?[-=+?]|//?|##?|%%?|\^\^|,,|:")
_ACTIVE = (
    "string",
    "raw_string",
    "ansi_c_string",
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
)
_LONGEST = 1 << 16  # characters of a value; X=$X$X in a few lines makes it as long as one likes
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def _divided(left: int, right: int) -> int:
    """Return the quotient rounded towards zero, as a shell does."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.Mod: lambda left, right: left - right * _divided(left, right),
}
_COMPARED: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Unknown:
    """The value of a variable that only running the script would tell."""

    why: str  # continues a sentence whose subject is the variable


Value = str | tuple[str, ...] | Unknown  # a text, or an array


@dataclass
class Scope:
    """The variables at one place of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # $1, $2, ...: of a function; a script is read as if started without any
    sourced: str = ""  # why a variable that is not set here may still be set: a file is sourced
    empty: bool = False  # a variable that is not set counts as empty, as in conditions

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or of a positional parameter; None if it is not set."""
        if name.isdigit():
            number = int(name[:9])
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        if name not in self.values and self.sourced:
            return Unknown(self.sourced)
        return self.values.get(name)

    def set(self, name: str, value: Value) -> None:
        """Set a variable. Raises ValueError for a value that is absurdly long."""
        if not isinstance(value, Unknown) and sum(map(len, value)) > _LONGEST:
            raise ValueError(f"the value of {name} has more than {_LONGEST} characters")
        self.values[name] = value


class Piece(NamedTuple):
    """A part of a word."""

    text: str
    splits: bool = False  # an expansion without quotes: the blanks in it separate words
    ends: bool = False  # a new word begins after this one, as between the elements of an array


def is_unset(value: Any) -> bool:
    """Tell whether a value still contains a shell variable, or a command that would have to be run."""
    return isinstance(value, str) and _LEFT.search(value) is not None


def fields(pieces: Iterable[Piece]) -> list[str]:
    """Return the words that a shell makes of these pieces."""
    found: list[str] = []
    word: str | None = None
    for piece in pieces:
        for number, part in enumerate(re.split(r"[ \t\n]+", piece.text) if piece.splits else [piece.text]):
            if number and word is not None:
                found.append(word)
                word = None
            if part or not piece.splits:
                word = (word or "") + part
        if piece.ends and word is not None:
            found.append(word)
            word = None
    return found if word is None else [*found, word]


def text_of(node: Node, scope: Scope) -> str:
    """Return one text where a shell does not split words: in an assignment, or within [[ ]]."""
    return "".join(piece.text + " " * piece.ends for piece in expand(node, scope))


def expand(node: Node, scope: Scope, quoted: bool = False) -> Iterator[Piece]:
    """Yield the pieces of a word."""
    raw = source_of(node).lstrip()
    if node.type == "string":
        active = list(_active(node))
        if not any(re.match(r"\s*\$(\{\w+\[@\]\}|@|\{@)", source_of(child)) for child in active):
            yield Piece("")  # "" is a word; "$@" without arguments is none
        yield from _region(node, active, node.start_byte + 1, node.end_byte - 1, scope, True)
    elif node.type == "raw_string":
        yield Piece(raw if quoted else raw[1:-1])
    elif node.type == "ansi_c_string":
        yield Piece(re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), raw[2:-1], flags=re.DOTALL))
    elif node.type == "process_substitution":
        yield Piece(raw, splits=True)
    elif node.type == "command_substitution":
        yield Piece(_left(f"$({raw[1:-1]})" if raw.startswith("`") else raw))
    elif node.type == "arithmetic_expansion":
        start = node.start_byte + len(source_of(node).encode()) - len(raw.encode())
        inner = _region(node, list(_active(node)), start + raw.index("(") + 2, node.end_byte - 2, scope, True)
        value = arithmetic("".join(piece.text for piece in inner), scope) if raw.startswith("$((") else None
        yield Piece(_left(raw) if value is None else str(value))
    elif node.type == "simple_expansion":
        yield from _parameter(raw[1:], None, raw, scope, quoted)
    elif node.type == "expansion":
        yield from _braces(node, raw, scope, quoted)
    else:
        yield from _region(node, list(_active(node)), node.start_byte, node.end_byte, scope, quoted)


def arithmetic(text: str, scope: Scope) -> int | None:
    """Return the value of $((text)), or None: whole numbers, names, + - * / %, comparisons and brackets are read."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return int(_COMPARED[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        found = scope.get(node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
        if isinstance(found, str) and re.fullmatch(r"-?(0|[1-9]\d{0,17})", found):
            return int(found)
        if type(found) is not int:
            raise ValueError
        return found

    try:
        found = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found if abs(found) < 2**63 else None


def _left(text: str) -> str:
    """Return an expression that stays as it is, as one word."""
    return re.sub(r"\s.*?(?=[)}]+$)", "...", text, flags=re.DOTALL) if re.search(r"\s", text) else text


def _active(node: Node) -> Iterator[Node]:
    """Yield the outermost parts of a word that are more than literal text."""
    for child in node.children:
        if child.type in _ACTIVE:
            yield child
        else:
            yield from _active(child)


def _region(
    node: Node, active: Iterable[Node], begin: int, end: int, scope: Scope, quoted: bool, splits: bool = False
) -> Iterator[Piece]:
    """Yield the pieces between two bytes of the script: the `active` parts of `node`, and the text around them."""

    def literal(start: int, stop: int) -> Iterator[Piece]:
        if start < stop:
            raw = (node.text or b"")[start - node.start_byte : stop - node.start_byte].decode("utf-8", "surrogatepass")
            escaped = r'\\([$`"\\\n])' if quoted else r"\\(.)"
            yield Piece(re.sub(escaped, lambda match: match[1].strip("\n"), raw, flags=re.DOTALL), splits)

    at = begin
    for child in active:
        if child.end_byte <= begin:
            continue
        raw = child.text or b""
        start = child.start_byte + (
            len(raw) - len(raw.lstrip())
        )  # the grammar counts blanks before $ in a string to it
        yield from literal(at, start)
        yield from expand(child, scope, quoted)
        at = child.end_byte
    yield from literal(at, end)


def _parameter(name: str, subscript: str | None, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the value of $name or ${name[subscript]}; what has none stays as it is written in `raw`."""
    found: Value | None = scope.arguments if name in ("@", "*") else scope.get(name)
    if name == "#":
        found = str(len(scope.arguments))
    elif name in ("@", "*"):
        subscript = name
    if subscript in ("@", "*") and not isinstance(found, Unknown):
        items = found if isinstance(found, tuple) else () if found is None else (found,)
        if subscript == "*" and quoted:
            yield Piece(" ".join(items))
        for number, item in enumerate(items if subscript == "@" or not quoted else ()):
            yield Piece(item, not quoted, ends=number < len(items) - 1)
        return
    if isinstance(found, tuple):
        index = subscript or "0"
        found = found[int(index)] if index.isdigit() and int(index) < len(found) else None
    elif subscript not in (None, "0"):
        found = None
    if found is None and scope.empty and re.match(r"\w", name):
        yield Piece("", not quoted)
    else:
        yield Piece(found, not quoted) if isinstance(found, str) else Piece(_left(raw))


def _braces(node: Node, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the value of ${...}."""
    begin = node.end_byte - len(raw.encode("utf-8", "surrogatepass")) + 2
    inner = (node.text or b"")[begin - node.start_byte : -1]
    head = _HEAD.match(inner)
    if head is None:
        yield Piece(_left(raw))
        return
    prefix, name = head[1].decode(), head[2].decode()
    subscript = None if head[3] is None else head[3].decode("utf-8", "replace")
    rest = inner[head.end() :]
    sign = _OPERATOR.match(rest)
    if prefix or not rest:
        found = scope.get(name)
        if prefix == "#" and not rest and isinstance(found, str | tuple) and not is_unset(found):
            counted = found if subscript in ("@", "*") or isinstance(found, str) else found[0] if found else ""
            yield Piece(str(len(counted)))
        elif prefix or rest:
            yield Piece(_left(raw))
        else:
            yield from _parameter(name, subscript, raw, scope, quoted)
        return
    start = begin + head.end() + (sign.end() if sign else 0)
    argument = [child for child in _active(node) if child.start_byte >= start - 1]
    if name in ("@", "*") and not scope.arguments:  # the script's own arguments: none
        return
    found = scope.get(name) if subscript in (None, "0") else Unknown("")
    found = (found[0] if found else None) if isinstance(found, tuple) else found
    if sign is None or isinstance(found, Unknown):
        yield Piece(_left(raw))
        return
    kind = sign[0].decode()
    if kind[-1] in "-=+":
        there = found is not None and (found != "" or not kind.startswith(":"))
        if there != (kind[-1] == "+"):
            yield Piece(found or "", not quoted) if kind[-1] != "+" else Piece("", not quoted)
            return
        pieces = list(_region(node, argument, start, node.end_byte - 1, scope, quoted, splits=not quoted))
        if kind[-1] == "=":
            scope.set(name, "".join(piece.text for piece in pieces))
        yield from pieces
        return
    given = "".join(piece.text for piece in _region(node, argument, start, node.end_byte - 1, scope, True))
    changed = None if found is None or is_unset(found) or is_unset(given) else _changed(found, kind, given)
    yield Piece(_left(raw)) if changed is None else Piece(changed, not quoted)


def _changed(value: str, kind: str, given: str) -> str | None:
    """Return what ${value<kind>given} makes of a value, or None where that is not known."""
    if kind in ("?", ":?"):
        return value if value or kind == "?" else None
    if kind in ("^^", ",,"):
        return None if given else value.upper() if kind == "^^" else value.lower()
    if kind == ":":
        match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", given)
        return match and value[int(match[1]) :][: int(match[2]) if match[2] else None]
    if kind[0] == "/":
        this, _, that = given.partition("/")
        plain = not re.search(r"[*?\[\\]|^[#%]", this)
        return (value.replace(this, that, -1 if kind == "//" else 1) if this else value) if plain else None
    if "\\" in given or len(value) > 4096:
        return None
    cuts = range(len(value) + 1) if kind in ("#", "%%") else range(len(value), -1, -1)
    for cut in cuts:
        gone, kept = (value[:cut], value[cut:]) if kind[0] == "#" else (value[cut:], value[:cut])
        if fnmatchcase(gone, given):
            return kept
    return value
