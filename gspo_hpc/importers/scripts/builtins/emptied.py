"""Note the options whose values come to nothing, since variables that a shell script leaves empty are all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from gspo_hpc.importers.scripts.parse import line_of, parse, source_of
from gspo_hpc.importers.scripts.scope import Scope
from gspo_hpc.importers.scripts.words import words_of

if TYPE_CHECKING:
    from tree_sitter import Node

# An option, = or blanks, and its value: as words of a command, elements of an array, or within a text; or key: value.
_EXPANDED = r"\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\([^()]*\)"
_VALUE = re.compile(
    r"""(?:^|(?<=[\s"'(]))[-+~]*([A-Za-z][\w.+@/-]*)(?:=|:?(?:\s|\\\n)+)(?=((?:"(?:[^"\\]|\\.)*"|"""
    + _EXPANDED
    + r"""|\\?[^\s"()])+))"""  # not consumed, since a text has options in it
)
_NAME = re.compile(r"\$\{?(\w+)")
_ENCLOSING = "[]'\" ,"  # signs of a list or a text with nothing in it


def note(scope: Scope, statement: Node | None) -> None:
    """Note the options in a statement whose values are nothing as it is followed."""
    if statement is not None and b"$" in (statement.text or b""):
        note_in(scope, source_of(statement), line_of(statement))


def note_in(scope: Scope, source: str, first: int) -> None:
    """Note the options in a text whose values are nothing as it is followed. `first`: its line of the script."""
    aside = replace(scope, **{one.name: copy(getattr(scope, one.name)) for one in fields(scope)})  # ${X[i++]} counts up
    for match in _VALUE.finditer(source):
        value = match[2]
        if value.count('"') % 2:  # the quote that ends the text in which the option stands
            value = value.removesuffix('"')
        if (named := _NAME.search(value)) is None or not _is_nothing(value, aside):
            continue
        line = first + source.count("\n", 0, match.start(1))
        scope.emptied[match[1].replace("-", "_")] = (named[1], line)


def _is_nothing(value: str, scope: Scope) -> bool:
    """Tell whether a word of the script is nothing, or a list or a text with nothing in it."""
    try:
        found = parse(f"_ {value}\n").root_node.named_children
        if len(found) != 1 or found[0].type != "command" or len(found[0].named_children) != 2:
            return False
        words = words_of(found[0].named_children[1], scope)
    except ValueError:  # a part of a text that is no word by itself; or the script's own statement says so
        return False
    return not "".join(words).strip(_ENCLOSING)


def told(emptied: Mapping[str, tuple[str, int]], values: Mapping[str, Any], flag: str, text: str) -> Iterator[str]:
    """Yield a sentence for each argument of a run that is empty, and not by its own text in the script, `text`.

    A run may have been started with a variable set, and tests in the script may ask for that in any way. `flag`: before
    the name of an argument.
    """
    for name, value in values.items():
        empty = value is None or value is True or (isinstance(value, str | list) and not str(value).strip(_ENCLOSING))
        if not empty or re.search(rf"""\b{re.escape(name)}(?:=|\s+)(?:""|''|\s|$)""", text):
            continue
        variable, line = emptied.get(name.replace("-", "_"), ("", 0))
        if variable:
            yield (
                f"{flag}{name} is empty, since ${variable} is (line {line}): if the original run had a value, write it "
                "out there"
            )
        elif isinstance(value, str | list) and value != []:
            yield f"{flag}{name} is empty as the script makes it: if the original run had a value, write it out there"
