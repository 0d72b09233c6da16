"""Effects of commands, assignments and declarations on the variables of a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import files, heredocs
from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.builtins import (
    calls,
    children,
    defaults,
    demands,
    emptied,
    launchers,
    options,
    reading,
    sbatch,
)
from gspo_hpc.importers.scripts.builtins.getopts import getopts
from gspo_hpc.importers.scripts.builtins.reading import named_later
from gspo_hpc.importers.scripts.conditions import are_declared, are_functions, compare
from gspo_hpc.importers.scripts.expansion.splitting import is_open, settled
from gspo_hpc.importers.scripts.handlers import trap
from gspo_hpc.importers.scripts.parse import line_of, parse, source_of
from gspo_hpc.importers.scripts.places import enter
from gspo_hpc.importers.scripts.scope import REST, Reference, Unknown, Value, is_unset
from gspo_hpc.importers.scripts.words import subscript_of, text_of, words_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_MARKS = ("export", "integer", "letters", "readonly")
# Commands that only set the stage: whoever writes `cd x && y` expects the first to succeed.
_STAGE = (". cd chmod conda cp ln mkdir module pip pip3 printf pushd popd rm shopt sleep "
          "source tee touch ulimit umask wait")  # fmt: skip
_SUCCEEDS = (":", "true", "echo", "set", "trap")  # in any case


def call(reader: Reader, words: list[str], line: int, outside: bool = False) -> bool | None:
    """Follow what a command does to variables, and note it; return whether it succeeds, None if not known."""
    name, *rest = words
    scope = reader.scope
    reader.staged = False
    if scope.mixed and is_unset(name):  # which may be any commands
        scope.lose_all(scope.mixed)
    emptied.note(scope, reader.statement)
    if name in reader.aliases and scope.mark("option", "expand_aliases") is not False:
        raise ValueError(f"line {line}: {name} is an alias (shopt -s expand_aliases): write out what it stands for")
    if name in reader.functions and not outside and len(reader.frames) < calls.DEEPEST:
        return calls.function(reader, name, rest, line)
    reader.note(words)
    rest = settled(rest)
    reader.staged = name in _STAGE.split()
    match name:
        case "exit" if reader.exits:
            reader.ended = "exit"
            reader.exit_place = reader.exit_place or scope.place * reader.certain
            return None
        case "exit":
            reader.over = True
            demands.passed(reader)
        case "return" if reader.frames:
            reader.ended = "return"
            reader.status = rest[0] == "0" if rest and rest[0].isdecimal() else None if rest else True
            return reader.status
        case "break" | "continue":
            if reader.loops:
                if rest and not rest[0].isdecimal():
                    raise ValueError(f"line {line}: {name} {rest[0]}: how many loops it ends is not known")
                reader.ended, reader.levels = name, min(int(rest[0]) if rest else 1, reader.loops)
            return True
        case "shift":
            if rest and not rest[0].isdecimal():
                if scope.arguments == (REST,):  # of which nothing is known before it either
                    return None
                raise ValueError(
                    f"shift {rest[0]}: not known before the script runs, so neither are $1 and the arguments after it"
                )
            count = int(rest[0]) if rest else 1
            if is_open(scope.arguments[:count]) or (is_open(scope.arguments) and count >= len(scope.arguments)):
                scope.arguments = (REST,)
                return None
            if count > len(scope.arguments):
                return False  # and leaves them as they are
            scope.arguments = scope.arguments[count:]
            return True
        case "getopts":
            return getopts(reader, rest, line)
        case "trap":
            trap(reader, rest, line)
        case "shopt":
            options.shopt(reader, rest, line)
        case "set":
            options.set_command(reader, rest, line)
        case "alias":
            reader.aliases |= {word.partition("=")[0] for word in rest}
        case "cd" | "pushd" | "popd":
            enter(scope, name, rest)
        case "export" | "declare" | "typeset" | "local" | "readonly" | "unset":  # written as "export", say
            for word in rest:
                key = re.split(r"[\[+=]", word)[0]
                if key.isidentifier():
                    scope.set(key, Unknown(f"is changed in line {line} in a way that is not followed"))
                elif is_unset(word):
                    reader.scope.lose_all(named_later(name, line), sets=name != "unset")
        case "type" if rest and rest[0][:1] != "-":
            return True if are_functions(rest, reader.functions, scope) else None  # it may be a program
        case "let":
            if any(map(calls.NAMED_LATER.match, rest)):
                reader.scope.lose_all(named_later("let", line))
            values = [evaluate(word, scope, line) for word in rest]
            return values[-1] != 0 if values and values[-1] is not None else None
        case "read" | "mapfile" | "readarray":
            reading.read(reader, name, rest, line)
        case "printf":
            reading.printf(reader, rest, line)
        case "wait" if "-p" in rest[:-1]:
            scope.set(rest[rest.index("-p") + 1], Unknown(f"is set by wait in line {line}"))
        case "source" | "." if rest:
            calls.source(reader, rest)
        case "eval":
            calls.evaluated(reader, " ".join(rest))
        case _ if (program := name.rpartition("/")[2]) in heredocs.SHELLS:
            children.shell(reader, words, line)
        case _ if program == "sbatch":
            sbatch.submitted(reader, words, line)
        case "[" | "test" if len(rest) == 4 - (name == "test"):
            return compare(rest[0], rest[1], rest[2], scope)
        case "test" if len(rest) == 2 and rest[0] in ("-n", "-z") and not is_unset(rest[1]):
            return bool(rest[1]) == (rest[0] == "-n")
        case _:
            launchers.launched(reader, words, line)
    return False if name == "false" else True if name in _SUCCEEDS else None


def assign(reader: Reader, node: Node) -> None:
    """Follow NAME=value, NAME+=value, NAME=(...) and NAME[key]=value."""
    scope = reader.scope
    emptied.note(scope, node)
    name, adds = node.named_children[0], node.children[1].type == "+="
    given = node.named_children[1] if len(node.named_children) > 1 else None
    key = source_of(name).partition("[")[0]
    if not (key := scope.target(key)):
        scope.set(source_of(name).partition("[")[0], "")
        return
    if scope.mark("readonly", key):
        raise ValueError(f"{key} is read-only (readonly, declare -r): bash refuses to change it; take that out")
    held = scope.values.get(key)
    assert not isinstance(held, Reference)  # what it stands for is `key`
    if name.type == "subscript" or (given is not None and given.type == "array"):
        scope.listed.add(key)
    value: Value
    lost = Unknown(f"is changed in line {line_of(node)} in a way that is not followed")
    if isinstance(held, Unknown) and adds:
        more = words_of(given, scope) if given is not None else []
        value = Unknown(lost.why, (*held.might, *more))
    elif name.type == "subscript":
        text = "" if given is None else text_of(given, scope)
        value = _with_element(reader, held, source_of(name)[len(key) + 1 : -1], text, adds) or lost
    elif given is not None and given.type == "array":
        items = [word for item in given.named_children if item.type != "comment"
                 for word in settled(words_of(item, scope, files=True))]  # fmt: skip
        keyed = [re.fullmatch(r"\[(.*?)\]=(.*)", item, re.DOTALL) for item in items]
        if any(keyed):
            pairs = {match[1]: match[2] for match in keyed if match}
            whole = isinstance(held, dict) and all(keyed) and not any(map(is_unset, pairs))
            why = Unknown(f"is an array with keys (line {line_of(node)})")
            value = ((held if adds and isinstance(held, dict) else {}) | pairs) if whole else why
        elif isinstance(held, dict):
            value = {} if not items and not adds else lost
        else:
            value = (
                (*(held if isinstance(held, tuple) else (held,) if held is not None else ()), *items)
                if adds
                else tuple(items)
            )
    elif scope.mark("integer", key):
        text = "0" if given is None else text_of(given, scope)
        number = evaluate(f"{held or 0} + ({text})" if adds else text, scope, line_of(node))
        value = lost if number is None else str(number)
    elif scope.mark("integer", key) is None:
        value = lost
    elif not adds and (same := defaults.handed_on(scope, given)):
        value = same
    else:
        text = files.temporary(reader, "" if given is None else text_of(given, scope), line_of(node))
        if adds and isinstance(held, tuple):
            value = lost if is_open(held[:1]) else (held[0] + text if held else text, *held[1:])
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
    items = [*held] if isinstance(held, tuple) else [held] if held is not None else []
    index = evaluate(key, reader.scope)
    if index is None or not -len(items) <= index <= len(items) or is_open(items[: index + 1] if index >= 0 else items):
        return None
    index += len(items) if index < 0 else 0
    text = items[index] + text if adds and index < len(items) else text
    return (*items[:index], text, *items[index + 1 :])


def unset(reader: Reader, node: Node) -> bool:
    """Follow unset."""
    flags = [text for child in node.named_children if (text := source_of(child)).startswith("-")]
    for name in _names_in(reader, [child for child in node.named_children if source_of(child) not in flags], "unset"):
        if "-f" in flags:
            reader.functions.pop(name, None)
            reader.scope.values.pop(f"function {name}", None)
        elif "-n" in flags:
            reader.scope.values.pop(name, None)
        elif name.isidentifier():
            reader.scope.unset(name)
            hidden = [frame for frame in reader.frames[:-1] if frame and name in frame]
            if hidden or name in reader.scope.given:  # what the caller's one hides comes back
                why = Unknown("is unset in another function than the one that has it")
                reader.scope.set(name, why)
                reader.scope.lasting.add(name)
                for frame in hidden:
                    frame[name] = why
        elif (held := name.partition("[")[0]).isidentifier():
            reader.scope.set(held, Unknown(f"has lost an element in line {line_of(node)}"))
    return True


def _names_in(reader: Reader, nodes: Sequence[Node], command: str) -> Iterator[str]:
    """Yield the words of a command that names variables; where a name is not known, any variable may be meant."""
    scope = reader.scope
    for child in nodes:
        for word in words_of(child, scope):
            if not is_unset(word.partition("=")[0]):
                yield word
                continue
            scope.empty = True  # what is never set names nothing
            left = [text for text in words_of(child, scope) if is_unset(text.partition("=")[0])]
            scope.empty = False
            if left:
                reader.scope.lose_all(named_later(command, line_of(child)), sets=command != "unset")


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
        found = words_of(parse(f"_ {name}\n").root_node.named_children[0].named_children[-1], reader.scope)
        if not equals or len(found) != 1 or is_unset(found[0]):
            reader.scope.lose_all(named_later("a declaration", line_of(group[0])))
        elif (key := found[0].rstrip("+")).isidentifier():
            lines = "\n" * (line_of(group[0]) - 1)
            yield parse(f"{lines}{key}{found[0][len(key) :]}={value}\n").root_node.named_children[0]


def declare(reader: Reader, node: Node) -> bool | None:
    """Follow declare, local, export and readonly."""
    kind = source_of(node.children[0])
    given = list(node.named_children)
    flags = "".join(text[1:] for child in given if (text := source_of(child)).startswith("-"))
    if set(flags) & set("fFp"):
        names = list(_names_in(reader, [child for child in given if source_of(child)[:1] not in ("-", "+")], kind))
        if "f" in flags and (kind == "export" or "x" in flags):
            for name in names:  # shells of bash that are started have the function, too
                reader.scope.put_mark("passed", name, "n" not in flags)
        if "f" in flags and (kind == "readonly" or "r" in flags):
            for name in names:
                reader.scope.put_mark("readonly function", name, True)
        if set(flags) & set("fF"):
            return are_functions(names, reader.functions, reader.scope)
        return are_declared(names, reader.scope) if kind in ("declare", "typeset") else True
    frame = next((held for held in reversed(reader.frames) if held is not None), None)  # of the function, in eval too
    local = kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
    scope = reader.scope
    line, begun = line_of(node), dict(scope.values)
    for child in _written_out(reader, [child for child in given if source_of(child)[:1] not in ("-", "+")]):
        known = child.type == "variable_assignment"
        for text in [source_of(child)] if known else _names_in(reader, [child], kind):
            name, equals, value = text.partition("=")
            name, adds = name.removesuffix("+"), name.endswith("+")
            key = name.partition("[")[0]
            if not key.isidentifier():
                continue
            if equals and scope.mark("readonly", key):  # it fails, and the script goes on
                continue
            if local and frame is not None and key not in frame:
                frame[key] = scope.values.get(key)
                for kept in _MARKS:  # what is declared of the local one ends with it
                    frame[f"{kept} {key}"] = held = scope.values.pop(f"{kept} {key}", None)
                    if kept == "export" and held is not None:
                        scope.values[f"{kept} {key}"] = held  # the local one is exported if the other is
                if reader.branches:
                    why = f"is perhaps local (line {line}), which depends on a condition"
                    frame[key] = Unknown(why)
                if not equals or "n" in flags or isinstance(frame[key], Reference):
                    scope.values.pop(key, None)
                    if key in scope.given and not equals:  # A=1 f, and local A in it
                        scope.set(key, Unknown(f"stands in front of a call and is local in it (line {line})"))
            if not local:
                scope.lasting.add(key)
            if "n" in flags and kind != "export":
                target = text_of(child.named_children[-1], scope) if known else value
                _refer(reader, key, target, line)
                continue
            if "i" in flags:
                scope.put_mark("integer", key, reader.certain or None)
            if not equals and not scope.mark("declared", key):
                scope.put_mark("declared", key, True)
            if "A" in flags and not isinstance(scope.get(key), dict):
                scope.set(key, {})
            if known:
                _assign_as_before(reader, child, key, begun)
            elif equals:
                held = scope.get(key)
                lost = Unknown(f"is changed in line {line} in a way that is not followed")
                plain = key == name and (not adds or isinstance(held, str | None)) and not scope.mark("integer", key)
                scope.set(key, (f"{held or ''}{value}" if adds else value) if plain else lost)
            if set(flags) & set("luc") and kind != "export":
                scope.put_mark("letters", key, True)
                if equals:
                    scope.set(key, Unknown(f"is declared in line {line} with letters that are changed"))
            if kind == "export" or "x" in flags:
                scope.put_mark("export", key, "n" not in flags)
            if kind == "readonly" or "r" in flags:
                scope.put_mark("readonly", key, True)
    return True


def _assign_as_before(reader: Reader, node: Node, key: str, begun: dict[str, Value]) -> None:
    """Follow an assignment of a declaration: all of its words are expanded before it sets any variable.

    Bash sets arrays before that, and computes integers after it.
    """
    scope, now = reader.scope, reader.scope.values
    begun = begun | {name: value for name, value in now.items() if isinstance(value, tuple | dict)}
    begun = now if scope.mark("integer", key) is not False else begun
    start = begun | {name: value for name, value in now.items() if not name.isidentifier()}
    start.pop(key, None)
    start |= {key: now[key]} if key in now else {}
    scope.values = dict(start)
    assign(reader, node)
    scope.values = now | {name: value for name, value in scope.values.items() if start.get(name) != value}


def _refer(reader: Reader, name: str, target: str, line: int) -> None:
    """Make a name stand for another variable; where that is not known, whatever is set by it may be any variable."""
    array = target.partition("[")[0]
    if target != array and array.isidentifier():
        reader.scope.set(array, Unknown(f"is an array of which an element has another name (line {line})"))
        target = ""
    plain = target.isidentifier() and target != name
    reader.scope.set(name, Reference(target if plain else ""))
