"""Tell which variables the handlers of a shell's trap may set while the script runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.parse import parse, source_of
from gspo_hpc.importers.scripts.scope import Unknown, is_unset
from gspo_hpc.importers.scripts.subshells import apart

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

# What the commands of runs have in them.
RUNS = re.compile(
    r"\b(?:swift|megatron)\s+rlhf\b|\bmain_(?:ppo|dapo)\b|\btrl\s+grpo\b|\b\w*g[rs]po\w*\.py\b|"
    r"\baccelerate\s+launch\b|\b(?:torchrun|deepspeed)\s"
)
_BETWEEN = ("DEBUG", "ERR", "RETURN")  # run between the commands of the script; others end it, or come from outside


def trap(reader: Reader, words: list[str], line: int) -> None:
    """Take what a handler sets to be unknown from here on, if it runs between the commands of the script."""
    words = words[1:] if words[:1] == ["--"] else words
    if len(words) < 2 or words[0] in ("-", "") or words[0].startswith("-"):
        return
    handler, *signals = words
    named = [name for name in _BETWEEN if name in {signal.upper().removeprefix("SIG") for signal in signals}]
    if {"EXIT", "0"} & {signal.upper().removeprefix("SIG") for signal in signals}:
        body = reader.functions.get(handler.partition(" ")[0])
        if RUNS.search(handler) or (body is not None and RUNS.search(source_of(body))):
            where = f"{reader.scope.place}: the handler {handler.partition(' ')[0]} of trap, which runs at the end,"
            reader.not_read.append(f"{where} is not followed: convert its command in a script of its own")
    if "DEBUG" in named or "RETURN" in named:  # what they write becomes output of functions (set -T)
        reader.scope.put_mark("option", "handlers", True)
    if named:
        reader.handlers.append((handler, f"may be set by the handler of {named[0]} (trap in line {line})"))
        set_by_handlers(reader)


def set_by_handlers(reader: Reader) -> None:
    """Take what the handlers set to be unknown. It is called again once a function is defined that they may call."""
    scope = reader.scope
    for handler, why in reader.handlers:
        touched, recording, certain = scope.touched, reader.recording, reader.certain
        scope.touched, reader.recording, reader.certain = set(), False, False
        try:
            apart(reader, parse(handler).root_node.named_children)
        except ValueError:
            scope.touched.add("*")
        names = scope.touched | ({"*"} if is_unset(handler.partition(" ")[0]) else set())
        scope.touched, reader.recording, reader.certain = touched, recording, certain
        scope.trapped.update(dict.fromkeys(names, Unknown(why)))
        if "*" in names:
            scope.lose_all(why)
        for name in names - {"*"}:
            scope.set(name, "")
