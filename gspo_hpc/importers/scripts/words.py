"""Turn the words of a parsed shell script into text, as far as the script alone says what they are.

Nothing is executed. What depends on the world outside the script (a command's output, a variable that is never set)
stays in the text as it is written, ``$NAME`` or ``$(command...)``, so that ``scope.is_unset`` recognises it later.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.expansion import braces, disguised, outputs, pathnames, patterns
from gspo_hpc.importers.scripts.expansion.locals import after_locals
from gspo_hpc.importers.scripts.expansion.parameters import (
    all_of,
    ansi_text,
    changed_text,
    items_of,
    left,
    never_set,
    not_known,
    part_of,
    value_piece,
    with_default,
)
from gspo_hpc.importers.scripts.expansion.splitting import Absent, Open, Piece, fields, is_open, settled
from gspo_hpc.importers.scripts.parse import Document, active_parts, line_of, parse, source_of, taken_out
from gspo_hpc.importers.scripts.scope import (
    ALWAYS,
    Reference,
    Scope,
    Unknown,
    Value,
    demanded,
    is_launched,
    is_unset,
    may_be_empty,
)

if TYPE_CHECKING:  # the parser is imported by read_script alone
    from tree_sitter import Node

_HEAD = re.compile(rb"([#!]?)([A-Za-z_]\w*|\d+|[@*#])(?:\[([^\]]*)\])?")
_OPERATOR = re.compile(rb":?[-=+?]|//?|##?|%%?|\^\^|,,|:")
# A redirection of errors alone; cd writes nothing else.
_ERRORS = re.compile(r"^[^<>]*\s2>\s*/dev/null\s*$|^\s*cd\s[^<>]*\s(?:&>|>&?)\s*/dev/null(?:\s+2>&1)?\s*$")
_QUOTES = re.compile(rb"['\"\\\\]")
_IN_DOCUMENT = re.compile(r"\\[\\$`\n]|\\?\"")  # what a here-document escapes, and quotes, which it does not
_COMPUTED = re.compile(r"\$\[(.*)\]", re.DOTALL)  # arithmetic, as parse() writes it where it is a default


def text_of(node: Node, scope: Scope) -> str:
    """Return one text where a shell does not split words: in an assignment, or within [[ ]]."""
    return "".join(piece.text + " " * piece.ends for piece in expand(node, scope))


def words_of(node: Node, scope: Scope, *, files: bool = False) -> list[str]:
    """Return the words that one word of a script becomes; `files`: how many files a pattern has matters."""
    if several := braces.expanded(node.type, source_of(node)):
        return several
    pieces = list(expand(node, scope))
    words = fields(pieces, scope.separators)
    words = pathnames.found(words, pieces) if files else words
    active = list(active_parts(node))
    whole = len(active) == 1 and source_of(node).strip().strip('"') == source_of(active[0]).strip()
    if len(words) > 1 and is_open(words) and active and not whole:
        return [Open(word) for word in words]  # where one of them is no word, what stands beside it joins the next
    return words


def pattern_of(node: Node, scope: Scope) -> str:
    """Return the pattern that a word of a script is; what is quoted in it stands for itself."""
    return _as_pattern(expand(node, scope))


def _as_pattern(pieces: Iterable[Piece]) -> str:
    return "".join(
        (patterns.escaped(piece.text) if piece.quoted and not is_unset(piece.text) else piece.text) + " " * piece.ends
        for piece in pieces
    )


def expand(node: Node, scope: Scope, quoted: bool = False) -> Iterator[Piece]:
    """Yield the pieces of a word."""
    raw = source_of(node).lstrip()
    if node.type == "string":
        active = list(active_parts(node))
        begin, end = node.start_byte + 1 + raw.startswith("$"), node.end_byte - 1
        pieces = [piece._replace(quoted=True) for piece in _region(node, active, begin, end, scope, True)]
        if any(re.match(r"\s*\$(\{\w+\[@\]|@|\{@)", source_of(child)) for child in active):
            if len(active) > 1 and all(
                not piece.text or may_be_empty(piece.text) for piece in pieces
            ):  # perhaps "$@$X" is no word
                pieces = [piece._replace(several=is_unset(piece.text)) for piece in pieces if piece.text]
        else:
            yield Piece("", quoted=True)  # "" is a word; "$@" without arguments is none
        yield from pieces
    elif node.type == "raw_string":
        yield Piece(raw if quoted else raw[1:-1], quoted=True)
    elif node.type == "ansi_c_string":
        yield Piece(ansi_text(raw[2:-1]), quoted=True)
    elif node.type == "process_substitution":
        yield Piece(raw, splits=True)
    elif node.type == "command_substitution" and raw.startswith("$((") and raw.endswith("))"):
        value = computed(node, scope)  # within ${...} the grammar takes arithmetic for commands
        yield _with_calls(raw, scope, not quoted) if value is None else Piece(str(value), not quoted)
    elif node.type == "command_substitution":
        found = _substituted(node, scope)
        raw = f"$({raw[1:-1]})" if raw.startswith("`") else raw
        yield _with_calls(raw, scope, not quoted) if found is None else value_piece(found, quoted)
    elif node.type == "arithmetic_expansion":
        value = computed(node, scope) if raw.startswith("$((") else None
        yield _with_calls(raw, scope, False) if value is None else Piece(str(value), not quoted)
    elif node.type == "simple_expansion":
        yield from _parameter(raw[1:], None, raw, scope, quoted)
    elif node.type == "expansion":
        yield from _braces(node, raw, scope, quoted)
    else:
        yield from _region(node, list(active_parts(node)), node.start_byte, node.end_byte, scope, quoted)


def _with_calls(raw: str, scope: Scope, several: bool) -> Piece:
    return Piece(outputs.with_calls(raw, left(raw), scope), several=several)


def computed(node: Node, scope: Scope) -> int | None:
    """Return the value of $(( )) or (( )), None where it is not known; what it assigns is assigned."""
    text = source_of(node)
    start = node.start_byte + text.encode("utf-8", "surrogatepass").index(b"((") + 2
    inner = _region(node, list(active_parts(node)), start, node.end_byte - 2, scope, True)
    return evaluate("".join(piece.text for piece in inner), scope, line_of(node))


def _region(
    node: Node, active: Iterable[Node], begin: int, end: int, scope: Scope, quoted: bool, splits: bool = False
) -> Iterator[Piece]:
    """Yield the pieces between two bytes of the script: the `active` parts of `node`, and the text around them."""

    def literal(start: int, stop: int) -> Iterator[Piece]:
        if start >= stop:
            return
        raw = disguised.shown((node.text or b"")[start - node.start_byte : stop - node.start_byte])
        if quoted:
            yield Piece(re.sub(r'\\([$`"\\\n])', lambda match: match[1].strip("\n"), raw), splits)
            return
        several = False
        if node.type in ("word", "concatenation"):
            if start == node.start_byte:
                raw = re.sub(r"^~(?=/|$)|^~[a-z_][a-z0-9_-]*(?=/)|^~[+-](?=/|$)", "$HOME", raw)
            several, raw = raw != (marked := braces.marked(raw)), marked
        for number, part in enumerate(re.split(r"\\(.)", raw, flags=re.DOTALL)):
            text = part.strip("\n") if number % 2 and part == "\n" else part
            if text:
                yield Piece(text, splits and not number % 2, several=several, quoted=bool(number % 2))

    if not quoted and node.type == "concatenation" and (text := braces.mixed(source_of(node))):
        yield Piece(text, several=True)
        return
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
    """Return what $(...) writes, None if it is not known; what it sets is gone after it."""
    before = scope.values
    scope.values = dict(before)
    try:
        found = _written(node, scope)
    finally:
        scope.values = before
    return None if found is None else found.rstrip("\n")


def _written(node: Node, scope: Scope) -> str | None:
    """Return what $(...) or a function writes, where that follows from words alone; of two commands: cd ... && pwd."""
    inner = [child for child in node.children if child.type == "&" or (child.is_named and child.type != "comment")]
    if len(inner) == 1 and inner[0].type == "list" and inner[0].children[1].type == "&&":
        inner = [child for child in inner[0].named_children if child.type != "comment"]
    inner = [child.child_by_field_name("body") or child
             if child.type == "redirected_statement" and _ERRORS.search(source_of(child)) else child
             for child in inner]  # fmt: skip
    if node.type in ("compound_statement", "subshell"):  # of a function
        inner = after_locals(inner, scope, text_of)
    if not inner or any(child.type != "command" for child in inner):
        return None
    parts = [child.named_children for child in inner]
    if any(part.type.endswith("_redirect") for command in parts for part in command):
        return None
    commands = [settled(word for part in command for word in words_of(part, scope)) for command in parts]
    if len(commands) == 1 and (found := taken_out(commands[0]))[1] is not None:
        alone = found[0] in (["cat"], ["cat", "-"]) and "cat" not in scope.shadowed
        return text_with_values(found[1], scope) if alone else None
    if not all(words and not any(map(is_unset, words)) for words in commands):
        return None
    if len(commands) == 1 and commands[0][0] in scope.shadowed:
        return outputs.called(commands[0][0], commands[0][1:], scope, _written)
    if any(words[0] in scope.shadowed for words in commands):
        return None
    if len(commands) == 2 and commands[0][0] == "cd" and commands[1][:1] == ["pwd"]:
        folder = [word for word in commands[0][1:] if word not in ("-P", "--")]
        return os.path.normpath(folder[0]) if len(folder) == 1 else None
    return outputs.output_of(commands[0], scope, evaluate) if len(commands) == 1 else None


def text_with_values(document: Document, scope: Scope) -> str | None:
    """Return the text of a here-document as the shell hands it on, None for one that cannot be followed."""
    if not document.replaced:
        return document.text
    quoted = _IN_DOCUMENT.sub(lambda match: {'"': '\\"', '\\"': '\\\\\\"'}.get(match[0], match[0]), document.text)
    try:
        given = parse(f'TEXT="{quoted}"\n').root_node.named_children[0]
        return text_of(given.named_children[-1], scope)
    except ValueError:
        return None


def subscript_of(text: str, scope: Scope) -> str | None:
    """Return the key between [ and ], expansions in it substituted; None if it is not known."""
    text = text.strip("\"'")
    if re.search(r"\$[^A-Za-z_{]|\$\{\w*\W*[^}\w]|`", text):
        try:
            given = parse(f'TEXT="{text}"\n').root_node.named_children[0].named_children[-1]
        except ValueError:
            return None
        found = text_of(given, scope)
    else:
        found = re.sub(
            r"\$\{?(\w+)\}?",
            lambda match: held if isinstance(held := scope.get(match[1]), str) else match[0],
            text,
        )
    return None if is_unset(found) else found


def _element(found: Value | None, subscript: str, scope: Scope) -> Value | None:
    """Return ${array[subscript]}."""
    key = subscript_of(subscript, scope)
    if isinstance(found, Unknown | Reference) or key is None:
        return Unknown("is an array of which the element is not known") if found is not None else None
    if isinstance(found, dict):
        return found.get(key)
    index = evaluate(key, scope)
    items = (found,) if isinstance(found, str) else found or ()
    if (
        index is None
        or (index < 0 and not isinstance(found, tuple))
        or is_open(items if index < 0 else items[: index + 1])
    ):
        return Unknown("is an array of which the element is not known") if found is not None else None
    return items[index] if -len(items) <= index < len(items) else None


def _parameter(name: str, subscript: str | None, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the value of $name or ${name[subscript]}; what has none stays as it is written in `raw`."""
    found: Value | None = scope.arguments if name in ("@", "*") else scope.get(name)
    if name in ("#", "@", "*") and not scope.arguments:
        scope.miss("@")
    if name == "#":
        found = "${#}" if is_open(scope.arguments) else str(len(scope.arguments))
    elif name in ("@", "*"):
        subscript = name
    if subscript in ("@", "*") and isinstance(found, dict) and len(found) > 1:  # their order is the shell's own
        yield Piece(left(raw), several=subscript == "@" or not quoted)
        return
    if subscript in ("@", "*") and not isinstance(found, Unknown) and (found is not None or name not in ALWAYS):
        yield from all_of(items_of(found), subscript, quoted, scope)
        return
    if subscript == "@" and quoted:
        yield Piece(left(raw), several=True)
        return
    if isinstance(found, dict | tuple) or subscript not in (None, "0"):
        found = _element(found, subscript or "0", scope)
    if isinstance(found, Absent) and scope.empty:
        yield Piece("", not quoted)
    elif isinstance(found, str):
        yield value_piece(found, quoted)
    elif found is None and never_set(name):
        yield Piece("", not quoted) if scope.empty else Piece(left(raw), absent=not quoted)
    else:
        yield not_known(raw, quoted)


def _braces(node: Node, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the value of ${...}."""
    begin = node.end_byte - len(raw.encode("utf-8", "surrogatepass")) + 2
    inner = (node.text or b"")[begin - node.start_byte : -1]
    head = _HEAD.match(inner)
    if head is None:
        yield not_known(raw, quoted)
        return
    prefix, name = head[1].decode(), head[2].decode()
    subscript = None if head[3] is None else head[3].decode("utf-8", "replace")
    rest = inner[head.end() :]
    sign = _OPERATOR.match(rest)
    if prefix or not rest:
        if prefix and not rest:
            yield from _prefixed(prefix, name, subscript, raw, scope, quoted)
        else:
            yield from [not_known(raw, quoted)] if rest else _parameter(name, subscript, raw, scope, quoted)
        return
    start = begin + head.end() + (sign.end() if sign else 0)
    argument = [child for child in active_parts(node) if child.start_byte >= start - 1]

    def given() -> list[Piece]:
        return list(_region(node, argument, start, node.end_byte - 1, scope, quoted, splits=not quoted))

    whole = name if name in ("@", "*") else subscript if subscript in ("@", "*") else None
    kind = "" if sign is None else sign[0].decode()
    if whole and kind == ":":
        yield from part_of(name, whole, "".join(piece.text for piece in given()), raw, scope, quoted)
        return
    same = rest[sign.end() if sign else 0 :].strip(b'"').decode("utf-8", "replace")
    if whole and kind[-1:] == "+" and same in (f"${{{name}[@]}}", f"${name}"):  # the elements, if there are any
        yield from _parameter(name, subscript, same, scope, quoted or rest.endswith(b'"'))
        return
    if whole:
        yield from with_default(name, whole, kind, given, raw, scope, quoted)
        return
    own = kind[-1:] in ("-", "=") and sign is not None and rest[sign.end() :].strip(b"\"'")  # a default of the script's
    read = scope.held if own else scope.get
    found = read(name) if subscript in (None, "0") else _element(read(name), subscript or "", scope)
    found = _element(found, "0", scope) if isinstance(found, tuple | dict) else found
    if own and isinstance(found, Unknown) and found.why in scope.presumed:
        found = None
    if isinstance(found, Absent) and kind.startswith(":"):
        found = ""
    if kind in ("?", ":?") and not found and (found is None or kind == ":?") and name.isidentifier():
        scope.set(name, demanded(line_of(node)))  # a run of the script has it from elsewhere
    if sign is None or isinstance(found, Unknown) or (found is None and name in ALWAYS):
        yield not_known(raw, quoted)
        return
    if found is None and is_launched(name) and (kind[-1] == "+" or not rest[sign.end() :]):
        yield not_known(raw, quoted)  # with a default, it counts as not set
        return
    if kind[-1] in "-=+":
        there = found is not None and (found != "" or not kind.startswith(":"))
        if isinstance(found, str) and is_unset(found) and kind.startswith(":") and may_be_empty(found):
            yield not_known(raw, quoted)  # perhaps it is empty
            return
        if there != (kind[-1] == "+"):
            yield value_piece(str(found or ""), quoted) if kind[-1] != "+" else Piece("", not quoted)
            return
        if found is None and is_launched(name):
            scope.defaulted[name] = None
        pieces = given()
        if match := _COMPUTED.fullmatch("".join(piece.text for piece in pieces)):
            value = evaluate(match[1], scope, line_of(node))
            pieces = [Piece(f"$(({match[1]}))" if value is None else str(value))]
        if kind[-1] == "=":
            text = "".join(piece.text for piece in pieces)
            element = Unknown("is an array of which an element is set by ${...=...}")
            scope.set(name, text if subscript is None else element)
            pieces = [value_piece(text, quoted)]
        yield from pieces
        return
    if _QUOTES.search(rest[sign.end() :]) and (quoted or kind == "/" or kind == "//"):
        yield not_known(raw, quoted)
        return
    operand = list(_region(node, argument, start, node.end_byte - 1, scope, quoted))
    text = _as_pattern(operand) if kind[0] in "#%" else "".join(piece.text for piece in operand)
    known = isinstance(found, str) and not is_unset(found) and not is_unset(text)
    changed = changed_text(found, kind, text, scope) if known and isinstance(found, str) else None
    yield not_known(raw, quoted) if changed is None else Piece(changed, not quoted)


def _prefixed(prefix: str, name: str, subscript: str | None, raw: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield ${#name}, ${!name} or the keys ${!name[@]}."""
    found = scope.get(name)
    if prefix == "!" and subscript is None and scope.target(name) != name:
        yield Piece(scope.target(name) or left(raw), several=not scope.target(name))
    elif prefix == "!" and subscript in ("@", "*"):
        if isinstance(found, tuple) or isinstance(found, dict) and len(found) < 2:
            keys = tuple(found) if isinstance(found, dict) else tuple(map(str, range(len(found))))
            yield from all_of(keys, subscript, quoted, scope)
        else:  # the order of keys is the shell's own
            yield Piece(left(raw), several=subscript == "@" or not quoted)
    elif prefix == "!" and subscript is None and isinstance(found, str) and found.isidentifier():
        yield from _parameter(found, None, raw, scope, quoted)
    elif prefix == "#" and isinstance(found, str | tuple | dict) and not any(map(is_unset, items_of(found))):
        items = items_of(found)
        if subscript in ("@", "*"):
            yield Piece(str(len(items)))
        else:
            element = _element(found, subscript or "0", scope)
            yield Piece(str(len(element)) if isinstance(element, str) else left(raw))
    else:
        yield not_known(raw, quoted)
