"""Reads the scripts and YAML files that other projects are started with, without a shell.

Floor 6. Of a script as much is followed as published examples need: line continuations, comments, assignments,
``${NAME}``, ``${NAME:-default}``, ``${NAME//this/that}``, ``$((1024 * 2))``, and ``if`` with a comparison of texts.
Nothing is run. What is not set in the script stays as it is written, ``$NAME``.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LEFT = re.compile(r"\$(?:[A-Za-z_{(]|\d)")
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)=\((.*)\)\s*", re.DOTALL)
_ELEMENTS = re.compile(r'"\$\{(\w+\[)[@*]\]\}"|\$\{(\w+\[)[@*]\]\}')
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|>>|>\||[<>]&|[<>](?!\()")
_NUMBERED = re.compile(r"\d*(?=[<>])")  # 2> is one sign, where a word begins with the number
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"?|'[^']*'?|`(?:[^`\\]|\\.)*`?|\\.", re.DOTALL)
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_WORDS_BEFORE = ("export", "declare", "local", "readonly", "exec", "time", "env", "nohup", "do", "{")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # a shell has whole numbers only
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Command:
    """One command of a script: its words, and the variables that were set where it stands."""

    words: tuple[str, ...]
    variables: Mapping[str, str]


def is_unset(value: Any) -> bool:
    """Whether a value still has a shell variable in it, or a command that would have to be run."""
    return isinstance(value, str) and _LEFT.search(value) is not None


def read_script(text: str) -> list[Command]:
    """The commands of a shell script, with its own variables put in.

    Raises ValueError for a quote that never ends, and for a redirection that leads nowhere.
    """
    variables: dict[str, str] = {}
    found: list[Command] = []
    branches: list[tuple[bool, bool]] = []  # of each `if` around: whether this branch counts, whether one has counted
    for statement in _statements(text):
        if match := _ARRAY.fullmatch(statement):
            variables[f"{match[1]}[@]"] = shlex.join(_split(_expand(match[2], variables)))
            continue
        words = _split(_expand(_without_redirections(statement), variables))
        while words and words[0] in ("if", "elif", "then", "else", "fi"):
            word, *words = words
            if word == "if":
                holds = _holds(words)
                branches.append((holds, holds))
                words = []
            elif branches and word in ("elif", "else"):
                done = branches[-1][1]
                holds = not done and (word == "else" or _holds(words))
                branches[-1] = (holds, done or holds)
                words = words if word == "else" else []
            elif branches and word == "fi":
                branches.pop()
        if not all(counts for counts, _ in branches):
            continue
        while words and words[0] in _WORDS_BEFORE:
            del words[0]
        here: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.match(words[0])):
            word = words.pop(0)
            here[word[: match.end() - 1]] = word[match.end() :]
        while words and words[0] in _WORDS_BEFORE:
            del words[0]
        if words:
            found.append(Command(tuple(words), variables | here))
        else:
            variables |= here
    return found


def read_yaml(text: str) -> dict[str, Any] | None:
    """The mapping of a YAML text, or None if it is something else. Raises ValueError with the line of a mistake."""
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"line {mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())[:200]}") from None
    return raw if isinstance(raw, dict) else None


def flatten(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings; an empty mapping is a value."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def options(words: tuple[str, ...] | list[str]) -> tuple[dict[str, Any], list[str]]:
    """Values of ``--name value …``, ``--name=value`` and ``--name`` (True), dashes in names as underscores; and the
    words before the first of them."""
    values: dict[str, Any] = {}
    before: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else True
        elif not name:
            before.append(word)
        else:
            held = values[name]
            values[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    return values, before


def _statements(text: str) -> Iterator[str]:
    """The statements of a script, quotes and variables still in them."""
    text = re.sub(r"[ \t]*\r?\n", "\n", text)  # blanks after a continuation end a command; nobody means that
    here, quote, depth, start, array = "", "", 0, True, False
    ends: list[str] = []  # of the here-documents that begin on the next line
    position = 0
    while position < len(text):
        char, pair = text[position], text[position : position + 2]
        if char == "\\" and quote != "'":
            here += "" if pair == "\\\n" else pair
            position, start = position + 2, pair == "\\\n" and start
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif pair in ("$(", "${"):
            here, depth, position = here + pair, depth + 1, position + 2
            continue
        elif char in "(){}" and (depth or (char == "(" and here.endswith(("=", "<", ">")))):
            array = array or not depth
            depth += 1 if char in "({" else -1
            array = array and depth > 0
        elif char == "#" and start and (array or not depth):
            position = text.find("\n", position)
            if position < 0:
                break
            continue
        elif not depth and text.startswith("<<", position) and not here.endswith("<"):
            ends += [match[2]] if (match := _HERE.match(text, position)) else []
        elif not depth and _ends(text, position):
            yield here
            here, start, position = "", True, position + 1
            while ends and char == "\n":
                last = re.compile(rf"^\t*{ends.pop(0)}$", re.MULTILINE).search(text, position)
                position = last.end() if last else len(text)
            continue
        here, start, position = here + char, char.isspace() and not quote, position + 1
    if quote:
        raise ValueError(f"a quote ({quote}) is opened and never closed: ...{here.strip()[:60]}")
    yield here


def _ends(text: str, position: int) -> bool:
    char = text[position]
    before = text[position - 1 : position]
    if char == "&":  # 2>&1 and &> send output elsewhere
        return before not in ("<", ">") and text[position + 1 : position + 2] != ">"
    return char in "\n;" or (char == "|" and before != ">")


def _without_redirections(statement: str) -> str:
    """The statement without what sends its input and output elsewhere; in quotes, < and > are text."""
    done, position, start = "", 0, True
    while position < len(statement):
        number = _NUMBERED.match(statement, position) if start else None
        if sign := _REDIRECTION.match(statement, number.end() if number else position):
            begin = sign.end() + len(statement[sign.end() :]) - len(statement[sign.end() :].lstrip())
            end = begin
            while end < len(statement) and not statement[end].isspace() and not _REDIRECTION.match(statement, end):
                end = _piece(statement, end)
            if end == begin:
                around = " ".join(statement[max(0, position - 30) :].split())[:60]
                raise ValueError(f"{sign.group()} leads to no file: put quotes around text with < > | & ;: ...{around}")
            done, position, start = f"{done} ", end, True
            continue
        end = _piece(statement, position)
        done, start, position = done + statement[position:end], statement[position].isspace(), end
    return done


def _piece(text: str, position: int) -> int:
    """Where a quoted text, an expression in brackets, or else one character ends."""
    if match := _QUOTED.match(text, position):
        return match.end()
    if text[position : position + 2] in ("$(", "${", "<(", ">("):
        return position + _closing(text[position:])
    return position + 1


def _split(statement: str) -> list[str]:
    try:
        return shlex.split(statement)
    except ValueError as error:
        raise ValueError(f"{error}: {' '.join(statement.split())[:80]}") from None


def _expand(statement: str, variables: Mapping[str, str]) -> str:
    """The statement with the values of variables in it, quoted as a shell would take them."""
    done, quote, position = "", "", 0
    while position < len(statement):
        char = statement[position]
        if not quote and (match := _ELEMENTS.match(statement, position)):  # words already, each quoted
            done, position = done + variables.get(f"{match[1] or match[2]}@]", ""), match.end()
            continue
        if char == "\\" and quote != "'":
            done, position = done + statement[position : position + 2], position + 2
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        if char != "$" or quote == "'":
            done, position = done + char, position + 1
            continue
        length, value = _variable(statement[position:], variables)
        if value is None:  # left as it is, as one word
            kept = statement[position : position + length]
            done += kept if not re.search(r"\s", kept) else re.sub(r"\s.*?(?=[)}]+$)", "...", kept, flags=re.DOTALL)
        else:
            done += re.sub(r'(["\\])' if quote else r"""(["'\\])""", r"\\\1", value)
        position += length
    return done


def _variable(text: str, variables: Mapping[str, str]) -> tuple[int, str | None]:
    """How much of the text is one expression that opens with $, and its value; None: it has none here."""
    if text[1:2] in ("{", "("):
        length = _closing(text)
        if text.startswith("$((") and text[:length].endswith("))"):
            return length, _arithmetic(_expand(text[3 : length - 2], variables), variables)
        return length, _braces(text[2 : length - 1], variables) if text[1] == "{" else None
    if match := _NAME.match(text, 1):
        return match.end(), variables.get(match.group())
    return (2, "") if text[1:2] in ("@", "*") else (min(2, len(text)), None)  # what the script is called with


def _closing(text: str) -> int:
    depth = 0
    for position, char in enumerate(text):
        depth += (char in "({") - (char in ")}")
        if position and depth == 0:
            return position + 1
    return len(text)


def _braces(inside: str, variables: Mapping[str, str]) -> str | None:
    """The value of ${inside}."""
    match = _NAME.match(inside)
    if match is None:
        default = re.match(r"\d+:?-", inside)
        return "" if inside[:1] in ("@", "*") else inside[default.end() :] if default else None
    value, rest = variables.get(match.group()), inside[match.end() :]
    if rest.startswith((":-", "-", ":=", "=")):
        kept = value if value is not None and (value or not rest.startswith(":")) else None
        return kept if kept is not None else " ".join(_split(_expand(rest.lstrip(":")[1:], variables)))
    if rest.startswith("//") and value is not None:
        this, _, that = rest[2:].partition("/")
        return value.replace(this, that) if this else value
    return value if not rest else None


def _arithmetic(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of $((text)): whole numbers, names, + - * / % and brackets."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        return int(variables[node.id]) if isinstance(node, ast.Name) else int(ast.literal_eval(node))

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _holds(words: list[str]) -> bool:
    """Whether a condition that compares two texts holds; one that cannot be read does not."""
    inner = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
    if len(inner) == 3 and not any(is_unset(word) for word in inner):
        left, sign, right = inner
        return {"=": left == right, "==": left == right, "!=": left != right}.get(sign, False)
    if len(inner) == 2 and inner[0] in ("-z", "-n"):
        return (inner[0] == "-z") == (not inner[1] or is_unset(inner[1]))
    return False
