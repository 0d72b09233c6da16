"""Turn the words of a parsed shell script into text, as far as the script alone says what they are.

Nothing is executed. What depends on the world outside the script (a command's output, a variable that is never set)
stays in the text as it is written, ``$NAME`` or ``$(command...)``, so that ``scope.is_unset`` recognises it later.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.parse import line_of, source_of
from gspo_hpc.importers.scripts.scope import (
    ALWAYS,
    REST,
    Piece,
    Reference,
    Scope,
    Unknown,
    Value,
    is_launched,
    is_unset,
)

if TYPE_CHECKING:  # the parser is imported by read_script alone
    from tree_sitter import Node

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
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_COMPUTED = re.compile(r"\$\[(.*)\]", re.DOTALL)  # arithmetic, as parse() writes it where it is a default
# {a,b} and {1..3} without quotes become several words; that is not followed, so they are marked as unknown.
_BRACES = re.compile(r"(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")


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
    elif node.type == "command_substitution" and raw.startswith("$((") and raw.endswith("))"):
        value = computed(node, scope)  # within ${...} the grammar takes arithmetic for commands
        yield Piece(_left(raw) if value is None else str(value))
    elif node.type == "command_substitution":
        found = _substituted(node, scope)
        left = _left(f"$({raw[1:-1]})" if raw.startswith("`") else raw)
        yield Piece(left) if found is None else Piece(found, not quoted)
    elif node.type == "arithmetic_expansion":
        value = computed(node, scope) if raw.startswith("$((") else None
        yield Piece(_left(raw) if value is None else str(value))
    elif node.type == "simple_expansion":
        yield from _parameter(raw[1:], None, raw, scope, quoted)
    elif node.type == "expansion":
        yield from _braces(node, raw, scope, quoted)
    else:
        yield from _region(node, list(_active(node)), node.start_byte, node.end_byte, scope, quoted)


def computed(node: Node, scope: Scope) -> int | None:
    """Return the value of $(( )) or (( )), None where it is not known; what it assigns is assigned."""
    text = source_of(node)
    start = node.start_byte + text.encode("utf-8", "surrogatepass").index(b"((") + 2
    inner = _region(node, list(_active(node)), start, node.end_byte - 2, scope, True)
    return evaluate("".join(piece.text for piece in inner), scope, line_of(node))


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
            if not quoted and node.type in ("word", "concatenation"):
                if start == node.start_byte:
                    raw = re.sub(r"^~(?=/|$)", "$HOME", raw)
                raw = _BRACES.sub(lambda match: f"$({match[0]})", raw)
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


def _substituted(node: Node, scope: Scope) -> str | None:
    """Return what $(...) writes, where that follows from its words alone: of echo, basename, dirname, cd ... && pwd."""
    inner = [child for child in node.named_children if child.type != "comment"]
    if len(inner) == 1 and inner[0].type == "list":
        inner = [child for child in inner[0].named_children if child.type != "comment"]
    inner = [child.child_by_field_name("body") or child if child.type == "redirected_statement" else child
             for child in inner]  # fmt: skip
    if not inner or any(child.type != "command" for child in inner):
        return None
    commands = [[word for part in child.named_children for word in fields(expand(part, scope))] for child in inner]
    if not all(words and not any(map(is_unset, words)) for words in commands):
        return None
    if len(commands) == 2 and commands[0][0] == "cd" and commands[1] == ["pwd"]:
        folder = [word for word in commands[0][1:] if word not in ("-P", "--")]
        return os.path.normpath(folder[0]) if len(folder) == 1 else None
    if len(commands) > 1:
        return None
    (name, *words) = commands[0]
    words = [word for number, word in enumerate(words) if number or word != "--"]
    if name in ("realpath", "readlink") and [word for word in words if word not in ("-f", "-e", "-m")] == [
        scope.script
    ]:
        return scope.script
    if name == "expr":
        plain = all(re.fullmatch(r"-?\d{1,18}|[-+*/%()]", word) for word in words)
        value = evaluate(" ".join(words), Scope()) if plain and words else None
        return None if value is None else str(value)
    if any(word.startswith("-") for word in words):
        return None
    if name == "echo" and not any("\\" in word or "*" in word for word in words):
        return " ".join(words)
    if name == "basename" and len(words) in (1, 2):
        last = words[0].rstrip("/").rpartition("/")[2]
        return last.removesuffix(words[1]) if len(words) == 2 and last != words[1] else last
    if name == "dirname" and len(words) == 1:
        return os.path.dirname(words[0].rstrip("/")) or ("/" if words[0].startswith("/") else ".")
    return None


def subscript_of(text: str, scope: Scope) -> str | None:
    """Return the key between [ and ], variables in it substituted; None if it is not known."""
    found = re.sub(r"\$\{?(\w+)\}?", lambda match: _text(scope.get(match[1]), match[0]), text.strip("\"'"))
    return None if is_unset(found) else found


def _text(value: Value | None, left: str) -> str:
    return value if isinstance(value, str) else left


def _element(found: Value | None, subscript: str, scope: Scope) -> Value | None:
    """Return ${array[subscript]}."""
    key = subscript_of(subscript, scope)
    if isinstance(found, Unknown | Reference) or key is None:
        return Unknown("is an array of which the element is not known") if found is not None else None
    if isinstance(found, dict):
        return found.get(key)
    index = evaluate(key, scope)
    items = (found,) if isinstance(found, str) else found or ()
    return items[index] if index is not None and -len(items) <= index < len(items) else None


def _items(found: Value | None) -> tuple[str, ...]:
    if isinstance(found, dict):
        return tuple(found.values())
    return found if isinstance(found, tuple) else (found,) if isinstance(found, str) else ()


def _all(items: tuple[str, ...], sign: str, quoted: bool) -> Iterator[Piece]:
    """Yield "${array[@]}" (a word for each), or "${array[*]}" (one word)."""
    if sign == "*" and quoted:
        yield Piece(" ".join(items))
    for number, item in enumerate(items if sign == "@" or not quoted else ()):
        yield Piece(item, not quoted, ends=number < len(items) - 1)


def _parameter(name: str, subscript: str | None, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the value of $name or ${name[subscript]}; what has none stays as it is written in `raw`."""
    found: Value | None = scope.arguments if name in ("@", "*") else scope.get(name)
    if name == "#":
        found = "${#}" if REST in scope.arguments else str(len(scope.arguments))
    elif name in ("@", "*"):
        subscript = name
    if subscript in ("@", "*") and not isinstance(found, Unknown):
        yield from _all(_items(found), subscript, quoted)
        return
    if isinstance(found, dict | tuple) or subscript not in (None, "0"):
        found = _element(found, subscript or "0", scope)
    if found is None and scope.empty and re.match(r"\w", name) and name not in ALWAYS and not is_launched(name):
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
        if prefix and not rest:
            yield from _prefixed(prefix, name, subscript, raw, scope, quoted)
        else:
            yield from [Piece(_left(raw))] if rest else _parameter(name, subscript, raw, scope, quoted)
        return
    start = begin + head.end() + (sign.end() if sign else 0)
    argument = [child for child in _active(node) if child.start_byte >= start - 1]

    def given() -> list[Piece]:
        return list(_region(node, argument, start, node.end_byte - 1, scope, quoted, splits=not quoted))

    if sign and sign[0] == b":" and (name in ("@", "*") or subscript in ("@", "*")):
        yield from _slice(name, subscript or name, "".join(piece.text for piece in given()), raw, scope, quoted)
        return
    if name in ("@", "*") and not scope.arguments:  # the script's own arguments: none
        return
    found = scope.get(name) if subscript in (None, "0") else _element(scope.get(name), subscript or "", scope)
    found = _element(found, "0", scope) if isinstance(found, tuple | dict) else found
    if sign is None or isinstance(found, Unknown) or (found is None and name in ALWAYS):
        yield Piece(_left(raw))
        return
    kind = sign[0].decode()
    if found is None and is_launched(name) and (kind[-1] == "+" or not rest[sign.end() :]):
        yield Piece(_left(raw))  # with a default, it counts as not set
        return
    if kind[-1] in "-=+":
        there = found is not None and (found != "" or not kind.startswith(":"))
        if there != (kind[-1] == "+"):
            yield Piece(str(found or ""), not quoted) if kind[-1] != "+" else Piece("", not quoted)
            return
        pieces = given()
        if match := _COMPUTED.fullmatch("".join(piece.text for piece in pieces)):
            value = evaluate(match[1], scope, line_of(node))
            pieces = [Piece(f"$(({match[1]}))" if value is None else str(value))]
        if kind[-1] == "=":
            scope.set(name, "".join(piece.text for piece in pieces))
        yield from pieces
        return
    text = "".join(piece.text for piece in _region(node, argument, start, node.end_byte - 1, scope, True))
    known = isinstance(found, str) and not is_unset(found) and not is_unset(text)
    changed = _changed(found, kind, text) if known and isinstance(found, str) else None
    yield Piece(_left(raw)) if changed is None else Piece(changed, not quoted)


def _prefixed(prefix: str, name: str, subscript: str | None, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield ${#name}, ${!name} or the keys ${!name[@]}."""
    found = scope.get(name)
    if prefix == "!" and subscript is None and scope.target(name) != name:
        yield Piece(scope.target(name) or _left(raw))
    elif prefix == "!" and subscript in ("@", "*") and isinstance(found, dict | tuple):
        keys = tuple(found) if isinstance(found, dict) else tuple(map(str, range(len(found))))
        yield from _all(keys, subscript, quoted)
    elif prefix == "!" and subscript is None and isinstance(found, str) and found.isidentifier():
        yield from _parameter(found, None, raw, scope, quoted)
    elif prefix == "#" and isinstance(found, str | tuple | dict) and not any(map(is_unset, _items(found))):
        items = _items(found)
        if subscript in ("@", "*"):
            yield Piece(str(len(items)))
        else:
            element = _element(found, subscript or "0", scope)
            yield Piece(str(len(element)) if isinstance(element, str) else _left(raw))
    else:
        yield Piece(_left(raw))


def _slice(name: str, sign: str, given: str, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield ${array[@]:begin:count}, or the same of the arguments, where the first is $0."""
    found: Value | None = scope.get(name)
    if name in ("@", "*"):
        found = (scope.script, *scope.arguments)
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", given)
    if match is None or isinstance(found, Unknown | dict) or any(map(is_unset, _items(found))):
        yield Piece(_left(raw))
        return
    items = _items(found)[int(match[1]) :]
    yield from _all(items[: int(match[2])] if match[2] else items, sign, quoted)


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
