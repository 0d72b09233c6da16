"""Read the commands of a shell script without running anything.

tree-sitter-bash parses the script; this module follows its statements in order. Variables are substituted as far as
the script alone says what they are, and a variable that the script never sets counts as not set. Where the outcome of
a condition, a loop or a sourced file is not known, the variables that depend on it become unknown, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import effects, files, heredocs
from gspo_hpc.importers.scripts.builtins import defaults, demands, launchers, prefixes, required, sbatch
from gspo_hpc.importers.scripts.cases import follow_case
from gspo_hpc.importers.scripts.conditions import holds, is_test, otherwise
from gspo_hpc.importers.scripts.expansion.splitting import Open, is_open
from gspo_hpc.importers.scripts.handlers import set_by_handlers
from gspo_hpc.importers.scripts.loops import follow_loop
from gspo_hpc.importers.scripts.parse import blanks_after_backslash, is_arithmetic, line_of, nodes, parse, source_of
from gspo_hpc.importers.scripts.places import beside, folder_of, written_out
from gspo_hpc.importers.scripts.scope import REST, SHIFTED, Outcome, Scope, Unknown, Value
from gspo_hpc.importers.scripts.script import Command, Script
from gspo_hpc.importers.scripts.subshells import apart, in_background, is_job, pipeline
from gspo_hpc.importers.scripts.words import computed, text_of, words_of

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST = 5_000  # statements followed, those of functions once for each call
_SETS = re.compile(r"(?m)(?:^|[;&|({]|\b(?:then|do|else|export|local|readonly)\b)[ \t]*([A-Za-z_]\w*)\+?=")


class TooLongError(ValueError):
    """More statements than are followed."""


def read_script(text: str) -> list[Command]:
    """Return the commands that a script runs. Raises ValueError as :func:`follow` does."""
    return follow(text).commands


def follow(
    text: str, folder: Path | None = None, name: str = "", exits: bool = True, presumed: Iterable[str] = ()
) -> Script:
    """Return the commands of a shell script, its own variables substituted.

    `folder` and `name` are those of its file: files that it sources are looked for beside it and in the folders above.
    With `exits` false an exit ends nothing. `presumed`: variables (@: the arguments) that whoever starts it sets, not
    known to what. Raises ValueError, with the line, for text that bash cannot parse, and for a script of absurd size.
    """
    reader = Reader(folder, name, exits, sbatch.directives(text))
    reader.scope.presume(presumed)
    sbatch.begin(reader.scope, text)
    for match in _SETS.finditer(text):
        reader.places.setdefault(match[1], text.count("\n", 0, match.start(1)) + 1)
    try:
        reader.walk(parse(text).root_node.named_children)
    except RecursionError:
        raise ValueError("the script is nested too deeply") from None
    read, needed, scope = dict.fromkeys(reader.read), dict.fromkeys(reader.required), reader.scope
    ways, blanks = (*(reader.own or (reader.found, reader.possible)), reader.exit_place), blanks_after_backslash(text)
    missed, not_read = (scope.missed, (*scope.defaulted,)), tuple(dict.fromkeys(reader.not_read))
    return Script(*ways, blanks, (*read,), (*needed,), scope.emptied, *missed, not_read, (*reader.told,))


class Reader:
    """The state while the statements of a script are followed."""

    def __init__(self, folder: Path | None, name: str, exits: bool, batch: dict[str, str]) -> None:
        self.file = None if folder is None else folder / (name or "-")
        script = str(self.file) if name else ""
        self.scope = Scope(script=script, main=script, batch=batch)
        self.exits = exits
        self.found: list[Command] = []
        self.possible: list[Command] = []
        self.read: list[str] = []
        self.written: dict[str, str | None] = {}  # path -> text, of here-documents; None: changed, not known how
        self.touched: dict[str, str] = {}  # file, or pattern of names -> the command that may change it
        self.told: dict[str, None] = {}  # sentences on files that have been read
        self.document: heredocs.Document | None = None  # what the present pipeline was given to read
        self.certain = True  # the statements that are followed do run
        self.recording = True  # commands are noted
        self.functions: dict[str, Node | None] = {}  # None: which one it is depends on a condition
        self.bodies: dict[str, list[Node]] = {}  # all that functions of a name have been
        self.frames: list[dict[str, Value | None] | None] = []  # of calls: what local variables hide; None: of a file
        self.returned: list[dict[str, Value]] = []  # variables at returns that may have ended the present call
        self.ended = ""  # exit, return, break or continue, where it ends what is followed; done: every way is ended
        self.status: bool | None = True  # of the last return
        self.loose = 0  # the loops that a break or continue may end, which depends on a condition that is not known
        self.levels = 1  # the loops that the present break or continue ends
        self.loops = 0  # those around the present statement, in the present function
        self.statement: Node | None = None  # the present command, before its words were expanded
        self.around: dict[str, Value] | None = None  # variables before those that stand before the present command
        self.branches = 0  # ways around the present statement that may not be taken, in the present function
        self.staged = False  # the last command only sets the stage, such as cd, and counts as successful in front of &&
        self.aliases: set[str] = set()
        self.exit_place = ""
        self.callers: list[Node | None] = []  # the calls of the functions around the present statement
        self.over = False  # an exit that ends nothing has been passed in the present block
        self.places: dict[str, int] = {}  # variables that the script sets anywhere -> first line that does
        self.own: tuple[list[Command], list[Command]] | None = None  # commands of jobs that are the script itself
        self.chain = [script]  # files of the shells that are followed within each other
        self.submitting = False  # such a job is followed
        self.not_read: list[str] = []  # sentences on scripts that it starts and that are not followed
        self.required: list[str] = []  # sentences on variables without whose values it ends
        self.demands = set[int]()  # statements that may lead to an exit which has just been passed
        self.option = (0, 0)  # of getopts: the argument whose letters are being read, and the next letter in it
        self.last_apart: bool | None = True  # the last part of a pipeline has its own shell too: no lastpipe
        self.handlers: list[tuple[str, str]] = []  # of traps that run between commands, and what they do to variables
        self.count = 0

    def walk(self, nodes: Iterable[Node]) -> bool | None:
        """Follow statements; return whether the last one succeeds, None if that is not known."""
        status: bool | None = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                status = in_background(self, node) if is_job(node) else self.run(node)
                required.errexit(self, node, status)
                if self.ended:
                    break
        return status

    def beside(self, name: str) -> Path | None:
        """Return the file beside which a name is looked for: the script, or one in the folder where commands run."""
        return self.file and beside(self.file, self.scope.values, name)

    def run(self, node: Node) -> bool | None:
        """Follow one statement; return whether it succeeds, None if that is not known."""
        self.count += 1
        sbatch.within(self, node)
        self.scope.line = line_of(node)
        if self.count > _MOST:
            raise TooLongError(f"line {line_of(node)}: more than {_MOST} statements; leave only the run in the file")
        try:
            return self._run(node)
        except TooLongError:
            raise
        except ValueError as error:
            raise ValueError(
                str(error) if str(error).startswith("line ") else f"line {line_of(node)}: {error}"
            ) from None

    def _run(self, node: Node) -> bool | None:
        match node.type:
            case "list" | "if_statement" if defaults.follow(self, node):
                return True
            case "command":
                return self._command(node, node.children)
            case "redirected_statement":
                body = node.child_by_field_name("body")
                if body is None or body.type == "command":
                    redirects = node.children_by_field_name("redirect")
                    return self._command(node, [*(body.children if body else ()), *redirects])
                status = self.run(body)
                for redirect in node.children_by_field_name("redirect"):
                    if redirect.type == "file_redirect" and (names := redirect.children_by_field_name("destination")):
                        place = ((redirect.children[0].type, text_of(names[0], self.scope)),)
                        files.lose(self, files.changed((), place, ""))
                return status
            case "variable_assignment":
                effects.assign(self, node)
                return None if any(child.type == "command_substitution" for child in nodes(node)) else True
            case "declaration_command":
                return effects.declare(self, node)
            case "unset_command":
                return effects.unset(self, node)
            case "list":
                return self._list(node)
            case "negated_command":
                status = self.walk(node.named_children)
                return None if status is None else not status
            case "pipeline":
                return pipeline(self, node)
            case "compound_statement" | "test_command" | "subshell" if is_arithmetic(node):
                value = computed(node, self.scope)
                return None if value is None else value != 0
            case "subshell":
                return apart(self, node.named_children)
            case "test_command":
                return holds(node, self.scope, node.children[0].type == "[[")
            case "if_statement":
                self._if(node)
                if demands.passed_in(self, node):  # what it demands is given, and may lead another way
                    self._if(node)
            case "case_statement":
                follow_case(self, node)
            case "for_statement" | "c_style_for_statement" | "while_statement":
                follow_loop(self, node)
            case "function_definition":
                name = source_of(node.named_children[0])
                self.functions[name] = body = node.child_by_field_name("body")
                self.bodies.setdefault(name, []).extend([] if body is None else [body])
                self.scope.define(name, body)
                set_by_handlers(self)
                return True
            case _:  # a group, the body of a loop
                return self.walk(node.named_children)
        return None

    def note(self, words: Sequence[str]) -> None:
        """Note a command that runs here."""
        if not self.recording:
            return
        scope = self.scope
        held = {key: value for key, value in scope.values.items() if key.isidentifier()}
        shown = {key: value if isinstance(value, str) else f"${key}" for key, value in held.items()
                 if isinstance(value, str | Unknown)}  # fmt: skip
        lost = scope.partly | {key: value for key, value in held.items() if isinstance(value, Unknown)}
        unset = {key: f"is set in line {line}, but not on the way that is followed"
                 for key, line in self.places.items() if key not in held}  # fmt: skip
        marks = {key: value for key, value in scope.values.items() if key.startswith("export ")}
        lost |= {key: value for key, value in marks.items() if isinstance(value, Unknown)}
        unknown = unset | scope.calls() | {key: value.why for key, value in lost.items()}
        if is_open(scope.arguments):
            first = next(number for number, word in enumerate(scope.arguments, 1) if isinstance(word, Open))
            unknown |= {str(number): SHIFTED for number in range(first, 10)}
        if scope.sourced:
            unknown["*"] = scope.sourced
        arrays = [key for key, value in held.items() if isinstance(value, tuple | dict)]
        unknown = dict.fromkeys(arrays, "is an array, and which of its elements is meant is not known") | unknown
        might = {key: value.might for key, value in lost.items() if value.might}
        inside = launchers.moved(scope.values, words)
        words = tuple(written_out(words, scope.values, self.file))
        written, where = files.written(self, inside), folder_of(inside)
        made = Command(words, shown, unknown, might, written, scope.exported, not self.certain, where)
        (self.found if self.certain else self.possible).append(made)

    # -- simple commands

    def _command(self, statement: Node, nodes: Sequence[Node]) -> bool | None:
        words: list[str] = []
        settings: list[Node] = []
        redirects: list[tuple[str, str]] = []
        at = statement.start_byte
        self.scope.empty = bool(nodes) and source_of(nodes[0]) == "test"  # as in [ ]
        for node in nodes:
            between = (statement.text or b"")[at - statement.start_byte : node.start_byte - statement.start_byte]
            words += between.decode("utf-8", "replace").replace("\\\n", " ").split()  # of `a - 2>&1` it loses the -
            at, parts = node.end_byte, [node]
            if node.type == "file_redirect":  # the grammar counts the words after the file to it
                sign, *names = [child for child in node.children if child.type != "file_descriptor"]
                parts = names if sign.type in (">&-", "<&-") else names[1:]
                if names:
                    redirects.append((sign.type, text_of(names[0], self.scope)))
                    files.refuse_placeholder(redirects, line_of(node))
            elif node.type in ("herestring_redirect", "heredoc_redirect", "comment"):
                continue
            for part in parts:
                if part.type == "variable_assignment":
                    settings.append(part)
                else:
                    counted = words[:1] == ["set"] or words[:1] and words[0] in self.functions
                    words += words_of(part, self.scope, files=bool(counted))
        self.scope.empty = False
        before, batch = dict(self.scope.values) if settings or prefixes.stand(words) else None, self.scope.batch
        self.around = before
        given = {source_of(node.named_children[0]).partition("[")[0] for node in settings}
        for node in settings:  # in front of a command they are its environment; its words do not see them
            effects.assign(self, node)
            if words:
                self.scope.put_mark("export", source_of(node.named_children[0]).partition("[")[0], True)
        words, outside, ends = prefixes.taken_off(self, words, given)
        lasting, self.scope.lasting = self.scope.lasting, set[str]()
        outer, self.scope.given = self.scope.given, self.scope.given | given
        words, document, path = files.write(self, statement, words, redirects)
        self.statement = statement
        status = effects.call(self, words, line_of(statement), outside) if words else True
        self.scope.given = outer
        if ends and words and not self.ended and self.exits:
            self.ended = "exit"
        others = [name for name in files.changed(words, redirects, document) if name != path]
        files.lose(self, others, "" if words and words[0] == "rm" and self.certain else None)
        files.touch(self, words, redirects)
        self.scope.batch = batch
        if before is not None and (words or outside):
            self.scope.restore(before, given | {f"export {name}" for name in given})  # all else that it sets stays
            for name in given & self.scope.lasting:  # by export in a function, say
                self.scope.set(name, Unknown(f"is set in a call after {name}=... (line {line_of(statement)})"))
                self.scope.put_mark("export", name, None)
        self.scope.lasting |= lasting
        return status

    # -- statements whose outcome may not be known

    def alternatives(
        self,
        blocks: Sequence[Sequence[Node]],
        line: int,
        certain: bool = False,
        why: str = "",
        demands: Sequence[Sequence[required.Demand]] = (),
    ) -> bool | None:
        """Follow blocks of which one runs, not known which; return the status of the first, None if it is not known.

        Variables that they set differently become unknown. A block that ends the script does not count, since nothing
        runs after it. `demands`: what leads to each block.
        """
        before, functions, was = self.scope.values, self.functions, self.certain
        every, returns, leaves = list[Outcome](), len(self.returned), False
        self.branches += 1
        self.certain = was and certain
        began, over, first = self.scope.arguments, self.over, None
        for number, block in enumerate(blocks):
            self.over = False
            self.scope.arguments = began
            self.scope.values, self.functions = dict(before), dict(functions)
            status = self.walk(block)
            first = first if number else status
            ended, self.ended = self.ended, ""
            if ended == "return":
                self.returned.append(self.scope.values)
            elif ended not in ("exit", "done"):
                every.append(Outcome(self.scope.values, self.functions, self.scope.arguments, self.over, number))
                leaves = leaves or ended in ("break", "continue")
                self.loose = max(self.loose, self.levels if ended in ("break", "continue") else 0)
        self.certain = was and not leaves and len(self.returned) == returns  # what follows runs in any case
        self.branches -= 1
        outcomes = [one for one in every if not one.over] or every
        self.over = over or any(one.over for one in outcomes)
        left = {one.arguments for one in outcomes}
        self.scope.arguments = left.pop() if len(left) == 1 else (REST,) if left else began
        if not outcomes:
            self.scope.values = before
            self.ended = "done" if len(self.returned) > returns else "exit"
            return first
        self.scope.values = outcomes[0].values
        if len(outcomes) > 1:
            why = why or f"depends on a condition in line {line}, which is not known before the script runs"
            self.scope.join([one.values for one in outcomes], why)
        elif demands and len(self.returned) == returns:
            required.hold(self, demands[outcomes[0].number], before)
        names = {name for one in outcomes for name in one.functions}
        bodies = [[one.functions.get(name) for one in outcomes] for name in names]
        self.functions = {name: found[0] if all(body == found[0] for body in found) else None
                          for name, found in zip(names, bodies, strict=True)}  # fmt: skip
        return first

    def _list(self, node: Node) -> bool | None:
        left, sign, right = (child for child in node.children if child.type != "comment")
        self.staged = False
        status = self.run(left)
        if self.ended:
            return status
        if status is None and sign.type == "&&" and self.staged:
            status = True  # whoever writes `cd x && y` expects the first to succeed
        if status is not None:
            return self.run(right) if status == (sign.type == "&&") else status
        # A command before && is taken to succeed, unless another one stands for where it does not.
        works = sign.type == "&&" and not is_test(left) and not otherwise(node)
        goes_on = [[], [(left, sign.type == "||")]]
        last = self.alternatives([[right], []], line_of(node), certain=works, demands=goes_on)
        return last if last == (sign.type == "||") else None  # `a && false` never succeeds, `a || true` always

    def condition(self, nodes: Sequence[Node], negated: bool = False) -> bool | None:
        """Follow the commands of a condition; return whether it holds, None if that is not known."""
        was, self.certain, returns = self.certain, False, len(self.returned)
        status = self.walk(nodes)
        self.certain = was and len(self.returned) == returns
        return None if status is None else status != negated

    def _arms(self, arms: Iterable[tuple[bool | None, Sequence[Node], Sequence[Node]]], node: Node) -> None:
        """Follow the first block whose condition holds; None is a condition whose outcome is not known.

        Behind it and its block, each of `arms` has the commands of the condition.
        """
        blocks: list[Sequence[Node]] = []
        demands: list[list[required.Demand]] = []
        before: list[required.Demand] = []  # the conditions before, which then do not hold
        for status, block, given in arms:
            if status is False:
                continue
            one = given if status is None and len(given) == 1 else ()
            blocks.append(block)
            demands.append([*before, *((part, True) for part in one)])
            before += ((part, False) for part in one)
            if status:
                break
        else:
            blocks.append(())
            demands.append(before)
        if len(blocks) == 1:
            self.walk(blocks[0])
        else:
            self.alternatives(blocks, line_of(node), demands=demands)

    def _if(self, node: Node) -> None:
        def arms() -> Iterator[tuple[bool | None, Sequence[Node], Sequence[Node]]]:
            for part in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
                then = next((number for number, child in enumerate(part.children) if child.type == "then"), None)
                inner = [child for child in part.children if child.type not in ("elif_clause", "else_clause")]
                if then is None:
                    yield True, inner, ()
                else:
                    given = [child for child in part.children[:then] if child.is_named and child.type != "comment"]
                    yield self.condition(part.children[:then]), inner[then:], given

        self._arms(arms(), node)
