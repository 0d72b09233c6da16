"""Effects of commands, assignments and declarations on the variables of a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.conditions import compare
from gspo_hpc.importers.scripts.getopts import getopts
from gspo_hpc.importers.scripts.handlers import trap
from gspo_hpc.importers.scripts.parse import line_of, parse, source_of
from gspo_hpc.importers.scripts.places import text_at
from gspo_hpc.importers.scripts.scope import REST, Reference, Unknown, Value, is_unset
from gspo_hpc.importers.scripts.subshells import apart
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
# An assignment to a variable whose name is not known: $k=3
_NAMED_LATER = re.compile(r"(?:^|[;&|\n])\s*\w*\$\{?\w+\}?\w*\s*[-+*/%|&^]?=(?!=)")
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
            count = int(rest[0]) if rest else 1
            if REST in scope.arguments:
                scope.arguments = scope.arguments[count:] or (REST,)
                return None
            if count > len(scope.arguments):
                return False  # and leaves them as they are
            scope.arguments = scope.arguments[count:]
            return True
        case "getopts":
            return getopts(reader, rest, line)
        case "trap":
            trap(reader, rest, line)
        case "shopt" if "lastpipe" in rest:
            set_here = reader.certain and ("-s" in rest or "-u" in rest)
            reader.last_apart = "-s" not in rest if set_here else None
        case "set" if "--" in rest:
            scope.arguments = tuple(rest[rest.index("--") + 1 :])
        case "let":
            if any(map(_NAMED_LATER.match, rest)):
                reader.lose_all(_named_later("let", line))
            values = [evaluate(word, scope, line) for word in rest]
            return values[-1] != 0 if values and values[-1] is not None else None
        case "read" | "mapfile" | "readarray":
            why = Unknown(f"is read from the input by {name}")
            for key in rest or ["REPLY" if name == "read" else "MAPFILE"]:
                if key.isidentifier():
                    scope.set(key, why)
                elif is_unset(key) and _word_that_names(key, rest):
                    reader.lose_all(_named_later(name, line))
        case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
            plain = rest[2] in ("%s", "%d") and len(rest) == 4 and not is_unset(rest[3])
            key = rest[1].partition("[")[0]
            if is_unset(key):
                reader.lose_all(_named_later("printf", line))
            else:
                why = Unknown(f"is written by printf in line {line}")
                scope.set(key, rest[3] if plain and key == rest[1] else why)
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
    whole = re.match(r"\s*\$\{?(\w+)\}?(?:\s|$)", text)
    lost = _NAMED_LATER.search(text) or (whole and isinstance(reader.scope.get(whole[1]), Unknown))
    reader.frames.append(None)
    reader.walk(parse(text).root_node.named_children)
    reader.frames.pop()
    if lost:
        reader.lose_all("may be set by eval, whose text is not known before the script runs")


def _shell(reader: Reader, rest: list[str]) -> None:
    """Follow a shell of its own: bash -c 'commands', or bash script.sh with arguments."""
    text, name, given = "", "", list[str]()
    plain = next((number for number, word in enumerate(rest) if not re.fullmatch(r"[-+][a-z]+|--", word)), len(rest))
    options, rest = "".join(word[1:] for word in rest[:plain] if word[0] == "-"), rest[plain:]
    if "c" in options and rest:
        text, given = rest[0], rest[2:]
    elif rest and not set(options) & set("os") and (found := _text(reader, rest[0])) is not None:
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
    apart(reader, tree.root_node.named_children, exported)
    reader.frames, scope.arguments = frames, arguments
    reader.ended = ""
    reader.read += [name] if name else []


def assign(reader: Reader, node: Node) -> None:
    """Follow NAME=value, NAME+=value, NAME=(...) and NAME[key]=value."""
    scope = reader.scope
    name, adds = node.named_children[0], node.children[1].type == "+="
    given = node.named_children[1] if len(node.named_children) > 1 else None
    key = source_of(name).partition("[")[0]
    if not (key := scope.target(key)):
        scope.set(source_of(name).partition("[")[0], "")
        return
    held = scope.values.get(key)
    assert not isinstance(held, Reference)  # what it stands for is `key`
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
    if key is None or isinstance(held, Unknown | Reference):
        return None
    if isinstance(held, dict):
        return held | {key: held.get(key, "") + text if adds else text}
    items = [*held] if isinstance(held, tuple) else [held] if held else []
    index = evaluate(key, reader.scope)
    if index is None or not 0 <= index <= len(items):
        return None
    text = items[index] + text if adds and index < len(items) else text
    return (*items[:index], text, *items[index + 1 :])


def unset(reader: Reader, node: Node) -> bool:
    """Follow unset."""
    flags = [text for child in node.named_children if (text := source_of(child)).startswith("-")]
    for name in _names_in(reader, [child for child in node.named_children if source_of(child) not in flags], "unset"):
        if "-f" in flags:
            reader.functions.pop(name, None)
        elif "-n" in flags:
            reader.scope.values.pop(name, None)
        elif name.isidentifier():
            reader.scope.unset(name)
        elif (held := name.partition("[")[0]).isidentifier():
            reader.scope.set(held, Unknown(f"has lost an element in line {line_of(node)}"))
    return True


def _names_in(reader: Reader, nodes: Sequence[Node], command: str) -> Iterator[str]:
    """Yield the words of a command that names variables; where a name is not known, any variable may be meant."""
    scope = reader.scope
    for child in nodes:
        for word in fields(expand(child, scope)):
            if not is_unset(word.partition("=")[0]):
                yield word
                continue
            scope.empty = True  # what is never set names nothing
            left = [text for text in fields(expand(child, scope)) if is_unset(text.partition("=")[0])]
            scope.empty = False
            if left:
                reader.lose_all(_named_later(command, line_of(child)))


def _named_later(command: str, line: int) -> str:
    return f"may be set by {command} in line {line}, where the variable's name is known only when the script runs"


def _word_that_names(word: str, words: Sequence[str]) -> bool:
    """Tell whether a word of read is a variable's name, and not the value of an option such as -p."""
    at = words.index(word)
    return not at or not re.fullmatch(r"-\w*[dinNptuCcOs]", words[at - 1])


def _written_out(reader: Reader, nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the words of a declaration; of `$1=$2`, which the grammar takes apart, the assignment that it is."""
    groups: list[list[Node]] = []
    for child in nodes:
        if groups and groups[-1][-1].end_byte == child.start_byte:
            groups[-1].append(child)
        else:
            groups.append([child])
    for group in groups:
        if len(group) == 1:
            yield group[0]
            continue
        name, equals, value = "".join(map(source_of, group)).partition("=")
        found = fields(expand(parse(f"_ {name}\n").root_node.named_children[0].named_children[-1], reader.scope))
        if not equals or len(found) != 1 or is_unset(found[0]):
            reader.lose_all(_named_later("a declaration", line_of(group[0])))
        elif (key := found[0].rstrip("+")).isidentifier():
            lines = "\n" * (line_of(group[0]) - 1)
            yield parse(f"{lines}{key}{found[0][len(key) :]}={value}\n").root_node.named_children[0]


def declare(reader: Reader, node: Node) -> bool:
    """Follow declare, local, export and readonly."""
    kind = source_of(node.children[0])
    given = list(node.named_children)
    flags = "".join(text[1:] for child in given if (text := source_of(child)).startswith("-"))
    if set(flags) & set("fFp"):
        return True
    frame = reader.frames[-1] if reader.frames else None
    local = kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
    scope = reader.scope
    line = line_of(node)
    for child in _written_out(reader, [child for child in given if source_of(child)[:1] not in ("-", "+")]):
        known = child.type == "variable_assignment"
        for text in [source_of(child)] if known else _names_in(reader, [child], kind):
            name, equals, value = text.partition("=")
            name, adds = name.removesuffix("+"), name.endswith("+")
            key = name.partition("[")[0]
            if not key.isidentifier():
                continue
            if local and frame is not None and key not in frame:
                frame[key] = scope.values.get(key)
                if not equals or "n" in flags or isinstance(frame[key], Reference):
                    scope.values.pop(key, None)
            if "n" in flags and kind != "export":
                target = text_of(child.named_children[-1], scope) if known else value
                _refer(reader, key, target, line)
                continue
            if "i" in flags:
                scope.integers.add(key)
            if "A" in flags and not isinstance(scope.get(key), dict):
                scope.set(key, {})
            if known:
                assign(reader, child)
            elif equals:
                held = scope.get(key)
                lost = Unknown(f"is changed in line {line} in a way that is not followed")
                plain = key == name and (not adds or isinstance(held, str | None)) and key not in scope.integers
                scope.set(key, (f"{held or ''}{value}" if adds else value) if plain else lost)
            if ("l" in flags or "u" in flags) and kind != "export" and equals:
                scope.set(key, Unknown(f"is declared in line {line} with letters that are changed"))
            if kind == "export" or "x" in flags:
                scope.exported.add(key)
    return True


def _refer(reader: Reader, name: str, target: str, line: int) -> None:
    """Make a name stand for another variable; where that is not known, whatever is set by it may be any variable."""
    array = target.partition("[")[0]
    if target != array and array.isidentifier():
        reader.scope.set(array, Unknown(f"is an array of which an element has another name (line {line})"))
        target = ""
    plain = target.isidentifier() and target != name
    reader.scope.set(name, Reference(target if plain else ""))
