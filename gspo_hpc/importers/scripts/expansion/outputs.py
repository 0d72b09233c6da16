"""Tell what a command writes whose output a script uses, where that follows from its words and functions alone."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.parse import source_of
from gspo_hpc.importers.scripts.scope import Scope, Unknown, not_followed, why_not_set

if TYPE_CHECKING:
    from tree_sitter import Node

_DEEPEST = 16  # functions that use the output of others
_MOST = 5_000  # calls of functions whose output is followed in one script
_LONGEST = 1 << 16  # characters of an output
_FORMAT = re.compile(r"%(?:[sd%]|\.\df)|\\n|[^%\\]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?")
_CALL = re.compile(r"\$\(\s*([^\s()$`'\"|;&<>]+)(?=([^()|;&<>]*))")  # a function, and the words that it is given
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_SUM = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")


def output_of(words: Sequence[str], scope: Scope, evaluate: Callable[[str, Scope], int | None]) -> str | None:
    """Return what one command writes, None if it is not known. All of its words have to be known."""
    name, *words = words
    if name == "echo":
        while words and words[0] == "-n":  # newlines at the end are removed in any case
            words.pop(0)
        plain = not (words and re.fullmatch(r"-[neE]+", words[0])) and not _are_patterns(words)
        return " ".join(words) if plain else None
    words = words[1:] if words[:1] == ["--"] else words
    if name in ("realpath", "readlink"):
        paths = [word for word in words if word not in ("-f", "-e", "-m", "-s", "--")]
        if len(paths) == 1 and _is_around(path := os.path.normpath(paths[0]), scope):
            return path
    if name == "expr":
        plain = all(re.fullmatch(r"-?\d{1,18}|[-+*/%()]", word) for word in words)
        value = evaluate(" ".join(words), Scope()) if plain and words else None
        return None if value is None else str(value)
    if name == "printf" and words and not words[0].startswith("-") and not _are_patterns(words[1:]):
        return _formatted(*words)
    words = words[1:] if words[:1] == ["--"] else words
    if any(word.startswith("-") for word in words):
        return None
    if name == "basename" and len(words) in (1, 2):
        last = words[0].rstrip("/").rpartition("/")[2]
        return last.removesuffix(words[1]) if len(words) == 2 and last != words[1] else last
    if name == "dirname" and len(words) == 1:
        return os.path.dirname(words[0].rstrip("/")) or ("/" if words[0].startswith("/") else ".")
    return None


def _is_around(path: str, scope: Scope) -> bool:
    """Tell whether a path is that of the script or of the file that it sources, of a folder above it or within."""
    folders = [os.path.dirname(one) for one in (scope.script, scope.here) if one]
    return os.path.isabs(path) and any(os.path.commonpath([path, folder]) in (path, folder) for folder in folders)


def _are_patterns(words: Sequence[str]) -> bool:
    """Tell whether files may take the place of these words, or a backslash in them may have a meaning."""
    return any(re.search(r"[\\*?\[]", word) for word in words)


def _formatted(form: str, *words: str) -> str | None:
    """Return what printf writes, with a format of plain text, %s, %d, %.2f, %% and newlines; None for any other."""
    parts = _FORMAT.findall(form)
    if "".join(parts) != form or re.search(r"[*?\[]", form):
        return None
    left, text = list(words), ""
    takes = [part for part in parts if part[0] == "%" and part != "%%"]
    while len(text) <= _LONGEST:  # the format is used again until no word is left
        for part in parts:
            one: str | None = {"%%": "%", "\\n": "\n"}.get(part, part)
            if part in takes:
                word = left.pop(0) if left else ""
                one = word if part == "%s" else _as_number(part, word or "0")
            if one is None:
                return None
            text += one
        if not left or not takes:
            return text
    return None


def _as_number(form: str, word: str) -> str | None:
    """Return a number as printf writes it, None where that is not plain: in base 8, or half way between two others."""
    if not _NUMBER.fullmatch(word) or (form == "%d" and "." in word):
        return None
    if form == "%d":
        return str(int(word))
    digits = Decimal(1).scaleb(-int(form[2]))
    number = Decimal(word)
    if abs(number / digits % 1) == Decimal("0.5"):
        return None
    return str(number.quantize(digits))


def called(name: str, words: Sequence[str], scope: Scope, written: Callable[[Node, Scope], str | None]) -> str | None:
    """Return what a call of a function writes, None where `written` does not follow its command."""
    body = scope.body(name)
    if body is None or scope.depth >= _DEEPEST or scope.followed >= _MOST:
        return None
    if _are_patterns(words) or any("(" in word for word in words) or sum(map(len, words)) > _LONGEST:
        return None
    if body.type not in ("compound_statement", "subshell") or b"BASH_SOURCE" in (body.text or b""):
        return None  # which file a function stands in is not known here
    if body.parent is None or body.parent.child_by_field_name("redirect") is not None:
        return None
    arguments, scope.arguments = scope.arguments, tuple(words)
    scope.depth, scope.followed = scope.depth + 1, scope.followed + 1
    try:
        found = written(body, scope)
    finally:
        scope.arguments, scope.depth = arguments, scope.depth - 1
    return None if found is None or len(found) > _LONGEST else found


def with_calls(raw: str, text: str, scope: Scope) -> str:
    """Return the text of an expansion that is not known, with the functions of the script whose output it uses.

    Why their outputs are not known is noted. `text`: the expansion as it is shown, which may lack the calls.
    """
    shown = dict(_CALL.findall(text.replace("...", " ")))
    for name, rest in dict(_CALL.findall(raw)).items():
        if name not in scope.shadowed:
            continue
        key, why = f"{name}()", _why(name, rest, scope)
        scope.outputs[key] = why if scope.outputs.get(key, why) == why else not_followed(name)
        if name not in shown:
            end = len(text.rstrip(")}"))
            text = f"{text[:end]}$({name}){text[end:]}"
    return text


def _why(name: str, words: str, scope: Scope) -> str:
    """Return why the output of a call is not known: a variable in it or in the function, else that it is not followed.

    `words`: those of the call, as they are written.
    """
    body = scope.body(name)
    inner = [] if body is None else [child for child in body.named_children if child.type != "comment"]
    if len(inner) != 1 or inner[0].type != "command":
        return not_followed(name)
    text = f"{words} {source_of(inner[0])}"
    sums = " ".join(found for found in _SUM.findall(text) if "$" not in found)
    for variable in [first or second for first, second in _NAME.findall(text)] + _WORD.findall(sums):
        held = scope.get(variable)
        why = held.why if isinstance(held, Unknown) else why_not_set(variable) if held is None else ""
        if why and not re.search(r"['\\]", text):
            return f"calls the function {name}, in which ${variable} {why}"
    return not_followed(name)
