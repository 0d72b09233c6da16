"""Follow a shell that a launcher starts: ``srun ... bash -c "commands"``, also within a container."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins.calls import DEEPEST
from gspo_hpc.importers.scripts.parse import nodes, parse, source_of
from gspo_hpc.importers.scripts.scope import REST, Unknown, is_unset
from gspo_hpc.importers.scripts.subshells import apart

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_LAUNCHERS = frozenset("srun mpirun mpiexec apptainer singularity docker podman nice numactl taskset timeout".split())
# Programs that may be given the word bash as an argument of their own.
_PROGRAM = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|ray|ssh|echo|xargs")
_COMMANDS = re.compile(r"-[a-z]*c")
_OWN_NAME = re.compile(r"\$\{?(?:0|BASH_SOURCE)")  # it is not the name of the script in such a shell


def text_of_shell(words: Sequence[str]) -> str:
    """Return the commands that a launcher gives to a shell with -c, an empty text if it starts none."""
    if words[0].rpartition("/")[2] not in (*_LAUNCHERS, "bash", "sh"):
        return ""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if _PROGRAM.fullmatch(name):
            return ""
        if name in ("bash", "sh"):
            options = next((n for n, option in enumerate(words[at + 1 :]) if option[:1] != "-"), len(words))
            given = words[at + 1 : at + 1 + options]
            texts = words[at + 1 + options :]
            plain = all(re.fullmatch(r"-[ceulx]+|--login", option) for option in given)
            if plain and texts and any("c" in option for option in given if option[1] != "-"):
                return "" if _OWN_NAME.search(texts[0]) else texts[0]
    return ""


def is_ambiguous(statement: Node | None, rest: Sequence[str]) -> bool:
    """Tell whether a $ in the commands that a shell is given may be the caller's: ``bash -c "A=1; run $A"``."""
    if statement is None or not any(map(_COMMANDS.fullmatch, rest)) or not any(map(is_unset, rest)):
        return False
    parts = list(nodes(statement))
    options = [node for node in parts if node.type == "word" and _COMMANDS.fullmatch(source_of(node))]
    texts = [node.next_named_sibling for node in options if node.next_named_sibling is not None] or [statement]
    expansions = {"simple_expansion", "expansion"}
    return any(node.type in expansions for text in texts for node in nodes(text))


def launched(reader: Reader, words: Sequence[str], line: int) -> None:
    """Follow the commands that a launcher gives to a shell.

    The launcher decides what that shell has in its environment, and text in double quotes has been expanded before:
    every variable in it counts as not known. So it does for a shell whose text is ambiguous.
    """
    text = text_of_shell(words)
    if not text or len(reader.frames) >= DEEPEST:
        return
    try:
        tree = parse("\n" * (line - 1) + text)
    except ValueError:
        return
    scope = reader.scope
    why = f"stands in the commands that {words[0]} gives to a shell (line {line}), and is not followed there"
    kept = scope.arguments, scope.sourced, scope.trapped, reader.frames, reader.functions, reader.loops
    scope.arguments, scope.sourced, scope.trapped = (REST,), why, {"*": Unknown(why)}
    reader.frames, reader.functions, reader.loops = [None] * (len(reader.frames) + 1), {}, 0
    apart(reader, tree.root_node.named_children, {})
    scope.arguments, scope.sourced, scope.trapped, reader.frames, reader.functions, reader.loops = kept
