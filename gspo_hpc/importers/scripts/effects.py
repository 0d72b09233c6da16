"""Effects of commands, assignments and declarations on the variables of a shell script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.conditions import compare
from gspo_hpc.importers.scripts.parse import line_of, parse, source_of
from gspo_hpc.importers.scripts.places import text_at
from gspo_hpc.importers.scripts.scope import Unknown, Value, is_unset
from gspo_hpc.importers.scripts.words import expand, fields, subscript_of, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_DEEPEST = 16  # calls of functions, and files, within each other
# Commands that only set the stage: whoever writes `cd x && y` expects the first to succeed.
_SUCCEEDS = (": . cd chmod conda cp echo export ln mkdir module pip pip3 printf pushd popd rm set shopt sleep "
             "source tee touch trap true ulimit umask wait")  # fmt: skip
# Sourced for their PATH; they set nothing that an argument of a run would be made of.
_HARMLESS = ("activate", "conda.sh", "mamba.sh", "bashrc", "bash_profile", "profile", "modules.sh", "lmod.sh")
_HOOK = re.compile(r"conda|mamba|modulecmd|ssh-agent|pyenv|direnv|brew")


def call(reader: Reader, words: list[str], line: int) -> bool | None:
    """Follow what a command does to variables, and note it; return whether it succeeds, None if not known."""
    name, *rest = words
    scope = reader.scope
    if name in reader.functions and len(reader.frames) < _DEEPEST:
        return _function(reader, name, rest)
    reader.note(words)
    match name:
        case "exit" if reader.exits:
            reader.ended, reader.exit_line = "exit", reader.exit_line or line if reader.certain else reader.exit_line
            return None
        case "return" if reader.frames:
            reader.ended = "return"
            reader.status = rest[0] == "0" if rest and rest[0].isdigit() else None if rest else True
            return reader.status
        case "break" | "continue":
            reader.ended = name
            return True
        case "shift":
            if rest and not rest[0].isdigit():
                raise ValueError(
                    f"shift {rest[0]}: not known before the script runs, so neither are $1 and the arguments after it"
                )
            scope.arguments = scope.arguments[int(rest[0]) if rest else 1 :]
            return True
        case "set" if "--" in rest:
            scope.arguments = tuple(rest[rest.index("--") + 1 :])
        case "let":
            values = [evaluate(word, scope, line) for word in rest]
            return values[-1] != 0 if values and values[-1] is not None else None
        case "read" | "mapfile" | "readarray":
            why = Unknown(f"is read from the input by {name}")
            scope.values.update({key: why for key in rest if key.isidentifier()})
        case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
            plain = rest[2] in ("%s", "%d") and len(rest) == 4 and not is_unset(rest[3])
            scope.set(rest[1], rest[3] if plain else Unknown(f"is written by printf in line {line}"))
        case "source" | "." if rest:
            _source(reader, rest)
        case "eval":
            _eval(reader, " ".join(rest))
        case "bash" | "sh" if rest:
            _shell(reader, rest)
        case "[" | "test" if len(rest) == 4 - (name == "test"):
            return compare(rest[0], rest[1], rest[2])
        case "test" if len(rest) == 2 and rest[0] in ("-n", "-z") and not is_unset(rest[1]):
            return bool(rest[1]) == (rest[0] == "-n")
    return False if name == "false" else True if name in _SUCCEEDS.split() else None


def _function(reader: Reader, name: str, rest: list[str]) -> bool | None:
    body = reader.functions[name]
    if body is None:
        reader.lose_all(f"may be set by {name}, a function that depends on a condition")
        return None
    scope = reader.scope
    arguments, scope.arguments = scope.arguments, tuple(rest)
    returned, reader.returned = reader.returned, []
    reader.frames.append({})
    status = reader.run(body)
    status = _leave(reader, status, f"depends on where {name} returns, which is not known before the script runs")
    for local, value in (reader.frames.pop() or {}).items():
        if value is None:
            scope.values.pop(local, None)
        else:
            scope.values[local] = value
    scope.arguments, reader.returned = arguments, returned
    return status


def _leave(reader: Reader, status: bool | None, why: str) -> bool | None:
    """Join the ways that lead out of a function or a sourced file; return its status."""
    if reader.returned:
        outcomes = [*reader.returned, *([reader.scope.values] if reader.ended in ("", "return") else [])]
        reader.scope.join(outcomes, why)
        reader.ended = ""
        return None
    if reader.ended == "return":
        reader.ended, status = "", reader.status
    return status


def _source(reader: Reader, rest: list[str]) -> None:
    """Follow a file that the script sources; where it is not at hand, any variable may be set by it."""
    name, *given = rest
    if name.rpartition("/")[2].lstrip(".") in _HARMLESS:
        return
    why = f"may be set by {name}, a file that the script sources and convert does not read"
    text = _text(reader, name)
    if text is None or len(reader.frames) >= _DEEPEST:
        reader.lose_all(why)
        return
    scope = reader.scope
    arguments, returned, reader.returned = scope.arguments, reader.returned, []
    scope.arguments = tuple(given) or arguments
    reader.frames.append(None)
    try:
        reader.walk(parse(text).root_node.named_children)
        reader.read.append(name)
    except ValueError:
        reader.lose_all(why)
    _leave(reader, None, f"depends on where {name} returns, which is not known before the script runs")
    reader.frames.pop()
    scope.arguments, reader.returned = arguments, returned


def _text(reader: Reader, name: str) -> str | None:
    try:
        return text_at(name, reader.file, reader.written)
    except (ValueError, OSError):
        return None


def _eval(reader: Reader, text: str) -> None:
    if _HOOK.search(text):
        return
    if len(reader.frames) >= _DEEPEST or re.search(r"\$\(|`", text):
        reader.lose_all("may be set by eval, whose text is not known before the script runs")
        return
    reader.frames.append(None)
    reader.walk(parse(text).root_node.named_children)
    reader.frames.pop()


def _shell(reader: Reader, rest: list[str]) -> None:
    """Follow a shell of its own: bash -c 'commands', or bash script.sh with arguments."""
    options = [word for word in rest if word.startswith("-")]
    text, name, given = "", "", list[str]()
    if options and rest[0].startswith("-") and "c" in rest[0] and len(rest) > 1:
        text, given = rest[1], rest[3:]
    elif not options and (found := _text(reader, rest[0])) is not None:
        text, name, given = found, rest[0], rest[1:]
    if not text or len(reader.frames) >= _DEEPEST:
        return
    try:
        tree = parse(text)
    except ValueError:
        return
    scope = reader.scope
    arguments, scope.arguments = scope.arguments, tuple(given)
    frames, reader.frames = reader.frames, [*reader.frames, None]
    exported = {key: value for key, value in scope.values.items() if key in scope.exported}
    reader.apart(tree.root_node.named_children, exported)
    reader.frames, scope.arguments = frames, arguments
    reader.ended = ""
    reader.read += [name] if name else []


def assign(reader: Reader, node: Node) -> None:
    """Follow NAME=value, NAME+=value, NAME=(...) and NAME[key]=value."""
    scope = reader.scope
    name, adds = node.named_children[0], node.children[1].type == "+="
    given = node.named_children[1] if len(node.named_children) > 1 else None
    key = source_of(name).partition("[")[0]
    held = scope.values.get(key)
    value: Value
    lost = Unknown(f"is changed in line {line_of(node)} in a way that is not followed")
    if isinstance(held, Unknown) and adds:
        more = fields(expand(given, scope)) if given is not None else []
        value = Unknown(lost.why, (*held.might, *more))
    elif name.type == "subscript":
        text = "" if given is None else text_of(given, scope)
        value = _with_element(reader, held, source_of(name)[len(key) + 1 : -1], text, adds) or lost
    elif given is not None and given.type == "array":
        items = [word for item in given.named_children if item.type != "comment"
                 for word in fields(expand(item, scope))]  # fmt: skip
        keyed = [re.fullmatch(r"\[(.*?)\]=(.*)", item, re.DOTALL) for item in items]
        if any(keyed):
            pairs = {match[1]: match[2] for match in keyed if match}
            whole = isinstance(held, dict) and all(keyed) and not any(map(is_unset, pairs))
            why = Unknown(f"is an array with keys (line {line_of(node)})")
            value = ((held if adds and isinstance(held, dict) else {}) | pairs) if whole else why
        elif isinstance(held, dict):
            value = {} if not items and not adds else lost
        else:
            value = (*(held if isinstance(held, tuple) else (held,) if held else ()), *items) if adds else tuple(items)
    elif key in scope.integers:
        text = "0" if given is None else text_of(given, scope)
        number = evaluate(f"{held or 0} + ({text})" if adds else text, scope, line_of(node))
        value = lost if number is None else str(number)
    else:
        text = "" if given is None else text_of(given, scope)
        if adds and isinstance(held, tuple):
            value = (held[0] + text if held else text, *held[1:])
        else:
            value = lost if isinstance(held, dict) else f"{held}{text}" if adds and held else text
    scope.set(key, value)


def _with_element(reader: Reader, held: Value | None, raw: str, text: str, adds: bool) -> Value | None:
    """Return an array with one element set; None where that is not known."""
    key = subscript_of(raw, reader.scope)
    if key is None or isinstance(held, Unknown):
        return None
    if isinstance(held, dict):
        return held | {key: held.get(key, "") + text if adds else text}
    items = [*held] if isinstance(held, tuple) else [held] if held else []
    index = evaluate(key, reader.scope)
    if index is None or not 0 <= index <= len(items):
        return None
    text = items[index] + text if adds and index < len(items) else text
    return (*items[:index], text, *items[index + 1 :])


def declare(reader: Reader, node: Node) -> bool:
    """Follow declare, local, export and readonly."""
    kind = source_of(node.children[0])
    flags = "".join(text[1:] for child in node.named_children if (text := source_of(child)).startswith("-"))
    frame = reader.frames[-1] if reader.frames else None
    local = kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
    scope = reader.scope
    for child in node.named_children:
        text = source_of(child) if child.type == "variable_assignment" else text_of(child, scope)
        name, equals, value = text.partition("=")
        name = name.rstrip("+")
        if not name.isidentifier():
            continue
        if "n" in flags and kind != "export":
            scope.set(name, Unknown(f"is another name of a variable (line {line_of(node)})"))
            continue
        if local and frame is not None and name not in frame:
            frame[name] = scope.values.get(name)
            if not equals:
                scope.values.pop(name, None)
        if "i" in flags:
            scope.integers.add(name)
        if "A" in flags and not isinstance(scope.values.get(name), dict):
            scope.set(name, {})
        if child.type == "variable_assignment":
            assign(reader, child)
        elif equals:
            scope.set(name, value)
        if ("l" in flags or "u" in flags) and kind != "export" and equals:
            scope.set(name, Unknown(f"is declared in line {line_of(node)} with letters that are changed"))
        if kind == "export" or "x" in flags:
            scope.exported.add(name)
    return True
