"""Follow shells that a script starts: bash with a file, with -c, or with commands on its input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.importers.scripts import files
from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.builtins import emptied
from gspo_hpc.importers.scripts.builtins.calls import DEEPEST, path_of
from gspo_hpc.importers.scripts.builtins.prefixes import not_yet
from gspo_hpc.importers.scripts.expansion import outputs
from gspo_hpc.importers.scripts.expansion.splitting import Absent, is_open, settled
from gspo_hpc.importers.scripts.heredocs import text_with_values
from gspo_hpc.importers.scripts.parse import Document, line_of, nodes, parse, source_of
from gspo_hpc.importers.scripts.places import moved, plain_path, text_at
from gspo_hpc.importers.scripts.scope import REST, Scope, Unknown, Value, is_unset
from gspo_hpc.importers.scripts.subshells import apart
from gspo_hpc.importers.scripts.words import text_of, words_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_OPTION = re.compile(r"[-+][A-Za-z]+|-|--.*")
_VALUED = ("--rcfile", "--init-file")
COMMANDS = re.compile(r"-[a-z]*c")
_MOST_WITHIN = 2  # times that a script which starts itself is followed
_KEPT = "\ue000"  # stands for a $ that a here-document has behind a backslash
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
OWN_NAME = re.compile(r"\$\{?(?:0|BASH_SOURCE)")  # is not the name of the script in such a shell
_SHELL = re.compile(r"#![^\n]*\b(?:ba|da|)sh\b")


class Commands(NamedTuple):
    """Text that a shell gets, and where it stands."""

    text: str
    name: str = ""  # of its file
    line: int = 1  # of the script on which it begins, for text that stands in it
    why: str = ""  # no variable that it asks for is known, continued after the variable's name


class Environment(NamedTuple):
    """Variables that a program sees."""

    values: Mapping[str, Value]
    batch: Mapping[str, str] | None = None  # that Slurm sets, if it is another job than the script's own
    sourced: str | None = None  # why others may be set, where that differs from the script's


class NotReadError(ValueError):
    """Commands that are not known: why, and what to convert instead, as a clause."""


def shell(reader: Reader, words: Sequence[str], line: int, seen: Environment | None = None) -> None:
    """Follow a shell of its own: bash -c 'commands', bash script.sh with arguments, or bash <<END.

    `seen`: what it has in its environment, where that is not what the script exports.
    """
    letters, rest = _options(words[1:])
    rest = settled(rest) or rest
    if "n" in letters:  # which only checks the script
        return
    try:
        if "c" in letters and rest:
            why = ambiguous(reader, words[0]) if is_ambiguous(reader, rest, COMMANDS) else ""
            found, given = Commands(rest[0], line=line, why=why), rest[2:]
        elif rest and "s" not in letters and rest[0].startswith("<("):
            found, given = _of_substitution(reader, words[0], rest)
        elif rest and "s" not in letters:
            found, given = of_file(reader, rest[0], words[0]), rest[1:]
        else:
            with not_yet(reader):
                found, given = of_input(reader, words[0], line), rest
        run(reader, found, given, seen or environment(reader))
    except NotReadError as error:
        lost(reader, error)


def _options(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the letters of the options that a shell is started with, and the words behind them."""
    letters, rest = "", list(words)
    while rest and not isinstance(rest[0], Absent) and _OPTION.fullmatch(rest[0]):
        option = rest.pop(0)
        if option in ("-", "--"):
            break
        named = option in _VALUED or not option.startswith("--") and option[-1] in "oO"
        letters += "" if option.startswith("--") or option[0] == "+" else option[1:]
        rest = rest[1:] if named else rest
    return letters, rest


def is_ambiguous(reader: Reader, given: Sequence[str], before: re.Pattern[str]) -> bool:
    """Tell whether a $ in the commands that a shell is given may be the caller's: ``bash -c "A=1; run $A"``.

    `before`: the word, or its beginning, that stands before the commands.
    """
    statement = reader.statement
    if statement is None or not any(map(is_unset, given)):
        return False
    options = [node for node in nodes(statement) if node.type == "word" and before.fullmatch(source_of(node))]
    texts = [node.next_named_sibling for node in options if node.next_named_sibling is not None] or [statement]
    with not_yet(reader):
        return any(_is_left(text, reader.scope) for text in texts)


def _is_left(node: Node, scope: Scope) -> bool:
    """Tell whether an expansion in a word, which the caller makes, is not known."""
    aside = _aside(scope)
    return any(is_unset(text_of(part, aside)) for part in _expansions(node))


def _aside(scope: Scope) -> Scope:
    """Return a copy, for what is expanded once more: ${X[i++]} counts up."""
    return replace(scope, **{one.name: copy(getattr(scope, one.name)) for one in fields(scope)})


def _expansions(node: Node) -> Iterator[Node]:
    """Yield the outermost expansions in a word."""
    for child in [node] if node.type in _EXPANSIONS else node.children:
        if child.type in _EXPANSIONS:
            yield child
        else:
            yield from _expansions(child)


def is_mixed(reader: Reader, blanks: bool = True) -> bool:
    """Tell whether an expansion that is not known stands in a word with blanks, which a program takes for commands.

    With `blanks` false any word counts.
    """
    parts = () if reader.statement is None else nodes(reader.statement)
    command = next((node for node in parts if node.type == "command"), None)
    scope = reader.scope
    with not_yet(reader):
        words = [] if command is None else [node for node in command.named_children if _is_left(node, scope)]
        return any(not blanks or re.search(r"\s", text_of(word, _aside(scope))) for word in words)


def ambiguous(reader: Reader, program: str) -> str:
    """Return why a variable is not known in commands where it may be the caller's."""
    return f"stands in the commands that {program} gives to a shell ({reader.scope.place}), and is not followed there"


def of_file(reader: Reader, name: str, program: str) -> Commands:
    """Return the text of a script that a program, if any, starts. Raises NotReadError for one that is not known."""
    starts = f"{reader.scope.place} starts {name}{f' with {program}' if program else ''}"
    if is_unset(name) and plain_path(name) not in reader.written:
        raise NotReadError(f"{starts}, and its name is known only when the script runs: convert that script itself")
    try:
        text = text_at(name, reader.beside(name), files.written(reader))
    except (ValueError, OSError) as error:
        raise NotReadError(f"{starts}: {error}") from None
    if text is None:
        raise NotReadError(f"{starts}, which is not at hand: convert {name} itself")
    return Commands(text, name)


def of_input(reader: Reader, program: str, line: int) -> Commands:
    """Return what a shell reads from its input. Raises NotReadError where that is not known."""
    statement = reader.statement
    strings = [node for node in nodes(statement) if node.type == "herestring_redirect"] if statement else []
    redirects = [node for node in nodes(statement) if node.type == "file_redirect"] if statement else []
    inputs = [node.named_children[-1] for node in redirects if node.children[0].type == "<" and node.named_children]
    if len(inputs) == 1 and not strings:
        return of_file(reader, text_of(inputs[0], reader.scope), program)
    if len(strings) == 1 and strings[0].named_children:
        word = strings[0].named_children[-1]
        text = text_of(word, reader.scope)
        mixed = is_unset(text) and _is_left(word, reader.scope)
        return Commands(text, line=line, why=ambiguous(reader, program) if mixed else "")
    piped = is_piped(reader)
    if not (inputs or strings or piped or reader.document):
        return Commands("")  # a shell of whoever starts the script
    if reader.document is not None and (found := _of_document(reader, reader.document, line + 1)):
        return Commands(found[0], line=line + 1, why=ambiguous(reader, program) if found[1] else "")
    before = statement.prev_named_sibling if piped and statement is not None else None
    if before is not None and before.prev_named_sibling is None and (output := _of_command(reader, before, program)):
        return output
    raise _not_followed(reader, program)


def has_input(reader: Reader) -> bool:
    """Tell whether the present command reads a file, a text or the output of another command."""
    parts = () if reader.statement is None else nodes(reader.statement)
    return is_piped(reader) or any(node.type in ("<", "<<<") for node in parts)


def is_piped(reader: Reader) -> bool:
    """Tell whether the present command stands in a pipeline behind another one."""
    around = None if reader.statement is None else reader.statement.parent
    first = reader.statement is None or reader.statement.prev_named_sibling is None
    return not first and around is not None and around.type == "pipeline"


def _not_followed(reader: Reader, program: str) -> NotReadError:
    what = f"the commands that {program} reads from its input are not followed"
    return NotReadError(f"{reader.scope.place}: {what}: convert them as a file of their own")


def _of_substitution(reader: Reader, program: str, words: Sequence[str]) -> tuple[Commands, list[str]]:
    """Return the commands that a shell reads from <(command), its first word, and the words behind it."""
    assert reader.statement is not None
    node = next(node for node in nodes(reader.statement) if node.type == "process_substitution")
    inner = node.named_children
    with not_yet(reader):
        found = _of_command(reader, inner[0], program) if len(inner) == 1 else None
    if found is None:
        raise _not_followed(reader, program)
    return found, [*words[len(source_of(node).split()) :]]


def _of_command(reader: Reader, node: Node, program: str) -> Commands | None:
    """Return what a command writes whose output a shell reads: cat with files, echo or printf; None for others."""
    scope = reader.scope
    if node.type != "command" or any(child.type.endswith("_redirect") for child in node.children):
        return None
    words = settled(word for child in node.named_children for word in words_of(child, scope))
    name, *rest = words or [""]
    if name in scope.shadowed or is_open(words):
        return None
    if name == "cat" and rest and not any(word.startswith("-") for word in rest):
        parts = [of_file(reader, word, program) for word in rest]
        text = "".join(part.text for part in parts)
        found = parts[0] if len(parts) == 1 else Commands(text, line=line_of(node))
        return None if OWN_NAME.search(text) else found
    if name in ("echo", "printf") and (text := outputs.output_of(words, scope, evaluate) or ""):
        mixed = is_unset(text) and _is_left(node, scope)
        return Commands(text, line=line_of(node), why=ambiguous(reader, program) if mixed else "")
    return None


def _of_document(reader: Reader, document: Document, line: int) -> tuple[str, bool] | None:
    """Return the text that a here-document becomes, and whether a $ that is left in it may be the caller's."""
    if not document.replaced:
        return document.text, False
    kept = re.sub(r"\\(.)", lambda pair: _KEPT if pair[1] == "$" else pair[0], document.text, flags=re.DOTALL)
    scope = reader.scope
    empty, scope.empty = scope.empty, True  # what is never set is nothing by the time the shell gets it
    text = text_with_values(Document(kept, True), scope)
    emptied.note_in(scope, document.text, line)
    scope.empty = empty
    return None if text is None else (text.replace(_KEPT, "$"), is_unset(text))


def environment(reader: Reader) -> Environment:
    """Return the variables that a program which is started sees, with what marks them."""
    scope = reader.scope
    seen = dict[str, Value]()
    for key, value in scope.values.items():
        if (
            key.isidentifier()
            and (exported := scope.mark("export", key)) is not False
            and not isinstance(value, tuple | dict)
        ):
            seen[key] = value if exported else Unknown("is perhaps not exported")
            seen[f"export {key}"] = "1"
    seen |= moved(scope.values)
    for name in [name for name in reader.functions if scope.mark("passed", name)]:
        seen |= {key: scope.values[key] for key in (f"passed {name}", f"function {name}") if key in scope.values}
    for key in scope.exported - scope.values.keys() if any(reader.frames) else ():
        seen[key] = Unknown("is that of the caller, where a local variable that is exported has no value")
    return Environment(seen)


def by_first_line(reader: Reader, found: Commands) -> Commands:
    """Return a script that its first line starts. Raises NotReadError where that names another program than a shell."""
    if found.text.startswith("#!") and _SHELL.match(found.text) is None:
        name = found.name or "a text"
        why = f"starts {name}, which is no script of bash or sh by its first line: convert {found.name or 'it'} itself"
        raise NotReadError(f"{reader.scope.place} {why}")
    return found


def run(reader: Reader, found: Commands, given: Sequence[str], seen: Environment) -> None:
    """Follow commands in a shell of their own, with these arguments and this environment."""
    path = path_of(reader, found.name) if found.name else ""
    deep = len(reader.frames) >= DEEPEST or (path and reader.chain.count(path) > _MOST_WITHIN)
    if not found.text or deep:
        return
    try:
        tree = parse(found.text if found.name else "\n" * (found.line - 1) + found.text)
    except ValueError as error:
        raise NotReadError(f"{found.name or 'what a shell is given'} is not followed: {error}") from None
    scope = reader.scope
    kept = scope.arguments, scope.script, scope.here, scope.sourced, scope.mixed, scope.batch
    outer = reader.frames, reader.functions, reader.loops
    scope.arguments = (REST,) if found.why else tuple(given)
    scope.sourced = scope.sourced if seen.sourced is None else seen.sourced
    scope.batch = scope.batch if seen.batch is None else dict(seen.batch)
    if found.why:
        scope.sourced = scope.mixed = found.why
    if found.name:  # a script of its own is $0, also for what it sources
        scope.script, scope.here, scope.mixed = path, None, ""
        reader.read.append(found.name)
    passed = {name: body for name, body in reader.functions.items() if f"passed {name}" in seen.values}
    reader.frames, reader.functions, reader.loops = [None] * (len(reader.frames) + 1), passed, 0
    reader.chain.append(path)
    try:
        apart(reader, tree.root_node.named_children, dict(seen.values))
    except ValueError as error:
        raise type(error)(f"{found.name}: {error}" if found.name else str(error)) from None
    reader.chain.pop()
    reader.frames, reader.functions, reader.loops = outer
    scope.arguments, scope.script, scope.here, scope.sourced, scope.mixed, scope.batch = kept
    reader.ended = ""


def lost(reader: Reader, error: NotReadError) -> None:
    """Note commands that are started and not followed."""
    if reader.recording:
        reader.not_read.append(str(error))
