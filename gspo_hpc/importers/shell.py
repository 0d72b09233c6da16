"""Read the commands of a shell script without running anything.

tree-sitter-bash parses the script; this module follows its statements in order. Variables are substituted as far as
the script alone says what they are, and a variable that the script never sets counts as not set. Where the outcome of
a condition, a loop or a sourced file is not known, the variables that depend on it become unknown, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gspo_hpc.importers.conditions import compare, holds, plain
from gspo_hpc.importers.parse import line_of, parse, source_of
from gspo_hpc.importers.words import Scope, Unknown, Value, arithmetic, expand, fields, is_unset, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST = 5_000  # statements followed, those of functions once for each call
_DEEPEST = 16  # calls of functions within each other
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_PREFIXES = ("exec", "time", "env", "nohup", "command", "builtin")
# Commands that only set the stage: whoever writes `cd x && y` expects the first to succeed.
_SUCCEEDS = (": . cd chmod conda cp echo export ln mkdir module pip pip3 printf pushd popd rm set shopt sleep "
             "source tee touch trap true ulimit umask wait")  # fmt: skip
# Sourced for their PATH; they set nothing that an argument of a run would be made of.
_HARMLESS = ("activate", "conda.sh", "mamba.sh", "bashrc", "bash_profile", "profile", "modules.sh", "lmod.sh")


@dataclass(frozen=True)
class Command:
    """One command of a script: its words, and the variables that are set where it stands."""

    words: tuple[str, ...]
    variables: Mapping[str, str]  # an unknown value is the variable's own name, $NAME
    unknown: Mapping[str, str] = field(default_factory=dict)  # variable (*: any other) -> why it is not known


@dataclass(frozen=True)
class Script:
    """The commands of a script."""

    commands: list[Command]  # those that run
    possible: list[Command]  # those that run only if a condition holds that is not known


def read_script(text: str) -> list[Command]:
    """Return the commands that a script runs. Raises ValueError as :func:`follow` does."""
    return follow(text).commands


def follow(text: str) -> Script:
    """Return the commands of a shell script, its own variables substituted.

    Raises ValueError, with the line, for text that bash would not read, and for a script of absurd size.
    """
    reader = _Reader()
    try:
        reader.walk(parse(text).root_node.named_children)
    except RecursionError:
        raise ValueError("the script is nested too deeply") from None
    return Script(reader.found, reader.possible)


class _Reader:
    """The state while the statements of a script are followed."""

    def __init__(self) -> None:
        self.scope = Scope()
        self.found: list[Command] = []
        self.possible: list[Command] = []
        self._certain = True  # the statements that are followed do run
        self._functions: dict[str, Node] = {}
        self._locals: list[dict[str, Value | None]] = []  # of each call: what its local variables hide
        self._count = 0

    def walk(self, nodes: Iterable[Node]) -> bool | None:
        """Follow statements; return whether the last one succeeds, None if that is not known."""
        status: bool | None = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                status = self.run(node)
        return status

    def run(self, node: Node) -> bool | None:
        """Follow one statement; return whether it succeeds, None if that is not known."""
        self._count += 1
        if self._count > _MOST:
            raise ValueError(f"line {line_of(node)}: more than {_MOST} statements; leave only the run in the file")
        try:
            return self._run(node)
        except ValueError as error:
            raise ValueError(
                str(error) if str(error).startswith("line ") else f"line {line_of(node)}: {error}"
            ) from None

    def _run(self, node: Node) -> bool | None:
        match node.type:
            case "command":
                return self._command(node, node.children)
            case "redirected_statement":
                body = node.child_by_field_name("body")
                if body is None or body.type == "command":
                    redirects = node.children_by_field_name("redirect")
                    return self._command(node, [*(body.children if body else ()), *redirects])
                return self.run(body)
            case "variable_assignment":
                self._assign(node)
                return True
            case "declaration_command":
                return self._declare(node)
            case "unset_command":
                for child in node.named_children:
                    self.scope.values.pop(text_of(child, self.scope), None)
                return True
            case "list":
                return self._list(node)
            case "negated_command":
                status = self.walk(node.named_children)
                return None if status is None else not status
            case "subshell":
                before = dict(self.scope.values)
                status = self.walk(node.named_children)
                self.scope.values = before
                return status
            case "compound_statement" if node.children[0].type == "((":
                return self._arithmetic(node)
            case "test_command":
                return holds(node, self.scope, node.children[0].type == "[[")
            case "if_statement":
                self._if(node)
            case "case_statement":
                self._case(node)
            case "for_statement" | "c_style_for_statement" | "while_statement":
                self._loop(node)
            case "function_definition":
                self._functions[source_of(node.named_children[0])] = node.named_children[-1]
                return True
            case _:  # a pipeline, a group, the body of a loop
                return self.walk(node.named_children)
        return None

    # -- simple commands

    def _command(self, statement: Node, nodes: Sequence[Node]) -> bool | None:
        words: list[str] = []
        settings: list[Node] = []
        at = statement.start_byte
        for node in nodes:
            between = (statement.text or b"")[at - statement.start_byte : node.start_byte - statement.start_byte]
            words += between.decode("utf-8", "replace").replace("\\\n", " ").split()  # of `a - 2>&1` it loses the -
            at, parts = node.end_byte, [node]
            if node.type == "file_redirect":  # the grammar counts the words after the file to it
                sign, *names = [child for child in node.children if child.type != "file_descriptor"]
                parts = names if sign.type in (">&-", "<&-") else names[1:]
            elif node.type in ("herestring_redirect", "heredoc_redirect", "comment"):
                continue
            for part in parts:
                if part.type == "variable_assignment":
                    settings.append(part)
                else:
                    words += fields(expand(part, self.scope))
        before = dict(self.scope.values) if settings else None
        for node in settings:  # in front of a command they are its environment; its words do not see them
            self._assign(node)
        while words and (words[0] in _PREFIXES or _ASSIGNMENT.match(words[0])):
            name, equals, value = words.pop(0).partition("=")
            if equals:
                before = dict(self.scope.values) if before is None else before
                self.scope.set(name, value)
        status = self._call(words) if words else True
        if before is not None and words:
            self.scope.values = before
        return status

    def _call(self, words: list[str]) -> bool | None:
        """Note a command, and follow what it does to variables."""
        name, *rest = words
        body = self._functions.get(name)
        if body is not None and len(self._locals) < _DEEPEST:
            arguments, self.scope.arguments = self.scope.arguments, tuple(rest)
            self._locals.append({})
            status = self.run(body)
            for local, value in self._locals.pop().items():
                if value is None:
                    self.scope.values.pop(local, None)
                else:
                    self.scope.values[local] = value
            self.scope.arguments = arguments
            return status
        values = self.scope.values
        shown = {key: value if isinstance(value, str) else f"${key}" for key, value in values.items()
                 if not isinstance(value, tuple)}  # fmt: skip
        unknown = {key: value.why for key, value in values.items() if isinstance(value, Unknown)}
        if self.scope.sourced:
            unknown["*"] = self.scope.sourced
        (self.found if self._certain else self.possible).append(Command(tuple(words), shown, unknown))
        if name in ("source", ".") and rest and rest[0].rpartition("/")[2].lstrip(".") not in _HARMLESS:
            self.scope.sourced = f"may be set by {rest[0]}, a file that the script sources and convert does not read"
            values.update({key: Unknown(self.scope.sourced) for key in values})
        elif name in ("read", "mapfile", "readarray"):
            values.update({key: Unknown(f"is read from the input by {name}") for key in rest if key.isidentifier()})
        if name in ("[", "test") and len(rest) == 4 - (name == "test"):
            return compare(rest[0], rest[1], rest[2])
        return False if name == "false" else True if name in _SUCCEEDS.split() else None

    def _assign(self, node: Node) -> None:
        name, adds = node.named_children[0], node.children[1].type == "+="
        given = node.named_children[1] if len(node.named_children) > 1 else None
        key = source_of(name).partition("[")[0]
        held = self.scope.values.get(key)
        value: Value
        if name.type == "subscript" or isinstance(held, Unknown) and adds:
            value = Unknown(f"is changed in line {line_of(node)} in a way that is not followed")
        elif given is not None and given.type == "array":
            items = [word for item in given.named_children if item.type != "comment"
                     for word in fields(expand(item, self.scope))]  # fmt: skip
            value = (*(held if isinstance(held, tuple) else (held,) if held else ()), *items) if adds else tuple(items)
            if any(re.match(r"\[.*\]=", item) for item in items):
                value = Unknown(f"is an array with keys (line {line_of(node)})")
        else:
            text = "" if given is None else text_of(given, self.scope)
            if adds and isinstance(held, tuple):
                value = (held[0] + text if held else text, *held[1:])
            else:
                value = f"{held}{text}" if adds and held else text
        self.scope.set(key, value)

    def _declare(self, node: Node) -> bool:
        for child in node.named_children:
            text = source_of(child) if child.type == "variable_assignment" else text_of(child, self.scope)
            name, equals, value = text.partition("=")
            if node.children[0].type == "local" and self._locals:
                self._locals[-1].setdefault(name.rstrip("+"), self.scope.values.get(name.rstrip("+")))
            if child.type == "variable_assignment":
                self._assign(child)
            elif equals and name.isidentifier():
                self.scope.set(name, value)
        return True

    def _arithmetic(self, node: Node) -> bool | None:
        """Follow (( )): variables that it changes become unknown."""
        text = source_of(node)[2:-2]
        changed = [first or second for first, second in _CHANGED.findall(text)]
        for name in changed:
            self.scope.set(name, Unknown(f"is computed in line {line_of(node)} in a way that is not followed"))
        value = None if changed else arithmetic(text.replace("$", ""), self.scope)
        return None if value is None else value != 0

    # -- statements whose outcome may not be known

    def _alternatives(self, blocks: Sequence[Sequence[Node]], node: Node, certain: bool = False) -> None:
        """Follow blocks of which one runs, not known which: variables that they set differently become unknown."""
        before, was, outcomes = self.scope.values, self._certain, []
        self._certain = was and certain
        for block in blocks:
            self.scope.values = dict(before)
            self.walk(block)
            outcomes.append(self.scope.values)
        self._certain = was
        why = f"depends on a condition in line {line_of(node)}, which is not known before the script runs"
        names = dict.fromkeys(name for values in outcomes for name in values)
        self.scope.values = {
            name: outcomes[0][name]
            if all(values.get(name) == outcomes[0].get(name) for values in outcomes)
            else Unknown(why)
            for name in names
        }

    def _list(self, node: Node) -> bool | None:
        left, sign, right = (child for child in node.children if child.type != "comment")
        status = self.run(left)
        if status is not None:
            return self.run(right) if status == (sign.type == "&&") else status
        self._alternatives([[right], []], node, certain=sign.type == "&&")  # what stands before && is taken to succeed
        return None

    def _condition(self, nodes: Sequence[Node], negated: bool = False) -> bool | None:
        was, self._certain = self._certain, False
        status = self.walk(nodes)
        self._certain = was
        return None if status is None else status != negated

    def _arms(self, arms: Iterable[tuple[bool | None, Sequence[Node]]], node: Node) -> None:
        """Follow the first block whose condition holds; None is a condition whose outcome is not known."""
        blocks: list[Sequence[Node]] = []
        for status, block in arms:
            if status is False:
                continue
            blocks.append(block)
            if status:
                break
        else:
            blocks.append(())
        if len(blocks) == 1:
            self.walk(blocks[0])
        else:
            self._alternatives(blocks, node)

    def _if(self, node: Node) -> None:
        def arms() -> Iterator[tuple[bool | None, Sequence[Node]]]:
            for part in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
                then = next((number for number, child in enumerate(part.children) if child.type == "then"), None)
                inner = [child for child in part.children if child.type not in ("elif_clause", "else_clause")]
                if then is None:
                    yield True, inner
                else:
                    yield self._condition(part.children[:then]), inner[then:]

        self._arms(arms(), node)

    def _case(self, node: Node) -> None:
        subject = plain(node.named_children[0], self.scope)

        def arms() -> Iterator[tuple[bool | None, Sequence[Node]]]:
            for item in (child for child in node.named_children if child.type == "case_item"):
                closed = next(number for number, child in enumerate(item.children) if child.type == ")")
                patterns = [child for child in item.children[:closed] if child.is_named]
                known = [plain(pattern, self.scope) for pattern in patterns]
                matched: bool | None = "*" in known
                if not matched and (subject is None or None in known):
                    matched = None
                elif subject is not None:
                    matched = any(fnmatchcase(subject, pattern or "") for pattern in known)
                yield matched, item.children[closed + 1 :]

        self._arms(arms(), node)

    def _loop(self, node: Node) -> None:
        body = node.child_by_field_name("body") or node.named_children[-1]
        line, certain, values = line_of(node), False, list[str]()
        if node.type == "while_statement":
            status = self._condition(node.children[1 : node.children.index(body)], node.children[0].type == "until")
            if status is False:
                return
            certain = bool(status)
        elif node.type == "for_statement":
            name = source_of(node.named_children[0])
            given = [child for child in node.named_children[1:] if child.id != body.id and child.type != "comment"]
            values = [word for child in given for word in fields(expand(child, self.scope))]
            values = values if any(child.type == "in" for child in node.children) else list(self.scope.arguments)
            if not values:
                return
            certain = not all(is_unset(word) for word in values)
            single = len(values) == 1 and certain
            several = Unknown(f"takes several values in the loop of line {line}")
            self.scope.set(name, values[0] if single else several)
            if single:
                self.walk([body])
                return
        elif match := re.match(r"for\s*\(\(\s*(\w+)\s*=", source_of(node)):
            self.scope.set(match[1], Unknown(f"takes several values in the loop of line {line}"))
        before, counts, was = dict(self.scope.values), (len(self.found), len(self.possible)), self._certain
        self._certain = was and certain
        self.walk([body])
        after = self.scope.values
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        if changed:  # a later round begins with what an earlier one has set
            del self.found[counts[0] :], self.possible[counts[1] :]
            self.scope.values = before | {name: Unknown(f"changes in the loop of line {line}") for name in changed}
            started = dict(self.scope.values)
            self.walk([body])
            self.scope.values = self.scope.values if certain else self.scope.values | started
        self._certain = was
