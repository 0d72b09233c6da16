"""Follow what runs other text in the script's own shell: functions, sourced files, and eval."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import files
from gspo_hpc.importers.scripts.expansion.splitting import settled
from gspo_hpc.importers.scripts.parse import parse
from gspo_hpc.importers.scripts.places import find_file, plain_path, text_at
from gspo_hpc.importers.scripts.scope import Unknown, is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

DEEPEST = 16  # calls of functions, and files, within each other
# Sourced for their PATH; they set nothing that an argument of a run would be made of.
_HARMLESS = ("activate", "conda.sh", "mamba.sh", "bashrc", "bash_profile", "profile", "modules.sh", "lmod.sh")
# An assignment to a variable whose name is not known: $k=3
NAMED_LATER = re.compile(r"(?:^|[;&|\n])\s*\w*\$\{?\w+\}?\w*\s*[-+*/%|&^]?=(?!=)")
# What eval is given of a tool that sets up the shell: eval "$(conda shell.bash hook)".
_PLAIN = re.compile(r"\s*[\w./-]+\s+[\w./-]")  # a command whose name and first word are known
_HOOK = re.compile(
    r"\s*[\"']?\$(?:\(\s*['\"]?(?:[\w./~-]*/|\$\{?\w+\}?/[\w./-]*)?"
    r"(?:conda|mamba|micromamba|modulecmd|ssh-agent|pyenv|direnv|brew)['\"]?(?:\.\.\.)?[^()]*\)|\(\$\{?(?:CONDA|MAMBA)_EXE"
    r"\}?(?:\.\.\.)?\)|\{?__(?:conda|mamba)_setup\}?)[\"']?\s*"
)


def function(reader: Reader, name: str, rest: list[str], line: int) -> bool | None:
    """Follow a call of a function; return whether it succeeds, None if that is not known."""
    body = reader.functions[name]
    scope, certain = reader.scope, reader.certain
    arguments, scope.arguments = scope.arguments, tuple(settled(rest))
    here, scope.here = scope.here, scope.homes.get(name)
    returned, reader.returned = reader.returned, []
    loops, reader.loops = reader.loops, 0
    branches, reader.branches = reader.branches, 0
    reader.frames.append({})
    reader.callers.append(reader.statement)
    status = None
    if body is None:  # defined only if a condition holds, or in several ways
        why = f"may be set by {name}, a function that depends on a condition"
        reader.alternatives([*([each] for each in reader.bodies.get(name, [])), []], line, why=why)
    else:
        status = reader.run(body)
    reader.callers.pop()
    reader.certain = certain
    status = _leave(reader, status, f"depends on where {name} returns, which is not known before the script runs")
    for local, value in (reader.frames.pop() or {}).items():
        if isinstance(held := scope.values.get(local), Unknown):
            scope.ended[local] = held.why
        if value is None:
            scope.values.pop(local, None)
        else:
            scope.values[local] = value
    scope.arguments, reader.returned, reader.loops, reader.branches = arguments, returned, loops, branches
    scope.here = here
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


def source(reader: Reader, rest: list[str]) -> None:
    """Follow a file that the script sources; where it is not at hand, any variable may be set by it."""
    name, *given = rest
    name = _on_path(reader, name)
    if name.rpartition("/")[2].lstrip(".") in _HARMLESS:
        return
    why = f"may be set by {name}, a file that the script sources and convert does not read"
    text = _text(reader, name)
    if text is None or len(reader.frames) >= DEEPEST:
        reader.scope.lose_all(why)
        return
    scope = reader.scope
    arguments, returned, reader.returned = scope.arguments, reader.returned, []
    scope.arguments = tuple(given) or arguments
    scope.reset = scope.reset and not given
    here, scope.here = scope.here, path_of(reader, name)
    reader.frames.append(None)
    try:
        reader.walk(parse(text).root_node.named_children)
        reader.read.append(name)
    except ValueError:
        reader.scope.lose_all(why)
    _leave(reader, None, f"depends on where {name} returns, which is not known before the script runs")
    reader.frames.pop()
    reader.returned, scope.here = returned, here
    if given:  # else it shares those of whoever sources it: its shift and set are theirs
        scope.arguments = scope.arguments if scope.reset else arguments  # bash gives back what set has not replaced
        scope.reset = False


def _on_path(reader: Reader, name: str) -> str:
    """Return the path of a file that is sourced by its bare name: bash looks for it in PATH before the folder."""
    held = reader.scope.values.get("PATH")
    if "/" in name or is_unset(name) or not isinstance(held, str):
        return name
    for folder in held.split(":"):
        path = f"{folder}/{name}"
        if folder and (plain_path(path) in files.written(reader) or find_file(path, reader.beside(path)) is not None):
            return path
    return name


def path_of(reader: Reader, name: str) -> str:
    """Return the path of a file that is followed, as BASH_SOURCE has it; "" where it is not at hand."""
    try:
        found = find_file(name, reader.beside(name))
    except ValueError:  # it may be one of several
        return ""
    return "" if found is None else str(found)


def _text(reader: Reader, name: str) -> str | None:
    try:
        return text_at(name, reader.beside(name), files.written(reader))
    except (ValueError, OSError):
        return None


def evaluated(reader: Reader, text: str) -> None:
    """Follow the text that eval is given; what sets up the shell (conda) sets nothing that a run is made of."""
    if _HOOK.fullmatch(text):
        return
    partly = re.search(r"\$\((?!\()|`", text) is not None  # $(( )) is no command
    if len(reader.frames) >= DEEPEST or (partly and not _PLAIN.match(text)):
        reader.scope.lose_all("may be set by eval, whose text is not known before the script runs")
        return
    whole = re.match(r"\s*\$\{?(\w+|[@*])\}?(?:\s|$)", text)
    name = whole[1] if whole else ""
    unknown = name in ("@", "*") or (name and isinstance(reader.scope.get(name), Unknown))
    lost = partly or NAMED_LATER.search(text) or unknown
    reader.frames.append(None)
    reader.walk(parse(text).root_node.named_children)
    reader.frames.pop()
    if lost:
        reader.scope.lose_all("may be set by eval, whose text is not known before the script runs")
