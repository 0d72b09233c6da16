"""Follow jobs that a shell script hands to Slurm, and read the lines #SBATCH by which a script says what it needs."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import files
from gspo_hpc.importers.scripts.builtins import children
from gspo_hpc.importers.scripts.builtins.calls import path_of
from gspo_hpc.importers.scripts.builtins.prefixes import not_yet
from gspo_hpc.importers.scripts.expansion.splitting import Absent, Open, settled
from gspo_hpc.importers.scripts.handlers import RUNS
from gspo_hpc.importers.scripts.parse import nodes, source_of
from gspo_hpc.importers.scripts.places import FOLDER, SUBMITTED, enter, find_file, moved
from gspo_hpc.importers.scripts.scope import Scope, Unknown, Value, is_unset
from gspo_hpc.importers.scripts.subshells import apart

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

# Options of sbatch that take no value, or only one behind a =; and the letters of those that take one.
_SWITCHES = frozenset(
    "contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue oversubscribe overcommit parsable "
    "propagate quiet reboot requeue resv-ports share spread-job stepmgr test-only usage use-min-nodes verbose version "
    "wait".split()
)
_VALUED = "AabBCcdDeFGiJLMmNnopqStwxZ"
_NAMES = {"N": "nodes", "D": "chdir", "workdir": "chdir"}  # the last up to Slurm 18.08
_SIZES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_GPUS = re.compile(r"(?:^|,)(?:gres/|gres:)?gpu:(?:[\w.-]+:)?(\d+)(?:\([^)]*\))?(?=,|$)")
_EACH = re.compile(r"(?:[\w.-]+:)?(\d+)")
_PAIR = re.compile(r"(?:[^,'\"]|'[^']*'|\"[^\"]*\")+")  # of --export, which quotes may surround
_WRAP = re.compile(r"--wrap(?:=.*)?", re.DOTALL)
_ACTS = re.compile(
    rb"sbatch|"
    + RUNS.pattern.encode()
    + rb"|(?:\$\(|`)[^)`]*\b(?:"
    + "|".join(sorted(files.CHANGERS)).encode()
    + rb")\b"
)
_STARTERS = re.compile(
    r"python[\d.]*|swift|megatron|trl|torchrun|accelerate|deepspeed|srun|mpi(?:run|exec)|ray|uv|(?:ba|da)?sh|env|nohup|"
    r"timeout|nice|time|ssh"
)
_SIMPLE = ("command", "variable_assignment", "declaration_command", "redirected_statement")


def directives(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets by the lines #SBATCH of a script, if sbatch gets no other options."""
    options = _lines(text)
    return {name: value for name, value in _sizes(options).items() if value} | exports(text)


def exports(text: str) -> dict[str, str]:
    """Return the variables that lines ``#SBATCH --export=NAME=value,...`` of a script put into its environment."""
    pairs = (pair.partition("=") for pair in _exported(_lines(text).get("export", "")))
    return {name: value for name, sign, value in pairs if sign and name.isidentifier()}


def begin(scope: Scope, text: str) -> None:
    """Have the variables and the folder with which a script begins, by its lines #SBATCH."""
    for key, value in exports(text).items():
        scope.set(key, value)
        scope.put_mark("export", key, True)
    if folder := _lines(text).get("chdir"):
        enter(scope, "cd", [folder])


def _lines(text: str) -> dict[str, str]:
    """Return the options in the lines #SBATCH of a script, which stand before its first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:  # a quote that is not closed
                continue
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    options: dict[str, str] = {}
    while words:
        found, words = _read(words)
        options |= found
        words = words[1:]  # no option: it is passed over
    return options


def _read(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return options of sbatch with their values, and the words behind them: the script and its arguments.

    *: a word that may be any options.
    """
    options: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0][:1] == "-" != rest[0] or (rest[1:] and _may_be_options(rest[0]))):
        word = rest.pop(0)
        if isinstance(word, Absent):  # never set, and so no word; but behind an option it is a value to be given
            continue
        if word[:1] == "$":
            options["*"] = word
            continue
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _NAMES.get(name, name)
            if not equals and name not in _SWITCHES and rest:
                value = rest.pop(0)
        else:  # letters, of which the last may have a value
            at = next((at for at, letter in enumerate(word) if at and letter in _VALUED), 0)
            name = _NAMES.get(word[at], word[at]) if at else word[1:]
            value = word[at + 1 :].removeprefix("=") if at else ""
            if at and not word[at + 1 :] and rest:
                value = rest.pop(0)
        options[name] = value
    return options, rest


def _may_be_options(word: str) -> bool:
    """Tell whether a word in the place of an option may be any number of them, or is none at all."""
    return isinstance(word, Absent) or (isinstance(word, Open) and word[:1] == "$")


def _sizes(options: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that Slurm sets by options, None for those whose values do not follow from them."""
    found: dict[str, str | None] = {}
    if "nodes" in options:
        nodes = options["nodes"] if options["nodes"].isdecimal() else None
        found |= dict.fromkeys(_SIZES[:2], nodes)
    gpus = _GPUS.search(options.get("gres", ""))
    each = _EACH.fullmatch(options.get("gpus-per-node", "")) or gpus
    if "gpus-per-node" in options or "gpu" in options.get("gres", "") or is_unset(options.get("gres")):
        found |= dict.fromkeys(_SIZES[2:], each[1] if each else None)
    return found


def _exported(text: str) -> list[str]:
    """Return the parts of the value of --export."""
    whole = text[1:-1] if text[:1] in ("'", '"') and text[-1:] == text[0] and len(text) > 1 else text
    parts = (pair.partition("=") for pair in _PAIR.findall(whole))
    return [f"{name}{sign}{value.strip(chr(39) + chr(34))}" for name, sign, value in parts]


def submitted(reader: Reader, words: Sequence[str], line: int) -> None:
    """Follow a job: sbatch with a script and its arguments, with --wrap, or with a script on its input."""
    command, rest = _read(words[1:])
    rest = settled(rest) or rest
    if {"test-only", "help", "usage", "version"} & {*command}:
        return
    try:
        found, given = _text(reader, command, rest, line)
        found = children.by_first_line(reader, found)
        lines = {} if "wrap" in command else _lines(found.text)
        itself = bool(found.name) and path_of(reader, found.name) == str(reader.file)
        sizes = _sizes(lines) | (dict.fromkeys(_SIZES) if "*" in command else _sizes(command))
        options = lines | command
        seen = _environment(reader, options)
        values = {key: value for key, value in seen.values.items() if key.removeprefix("export ") not in sizes}
        values |= _folders(reader, options.get("chdir", ""), lines.get("chdir", "") if itself else "")
        for name in ("SLURM_JOB_ID", "SLURM_JOBID"):  # it is not known, and not empty
            values |= {name: f"job-${name}", f"export {name}": "1"}
        batch = {name: size for name, size in sizes.items() if size}
        seen = children.Environment(values, batch, seen.sourced)
        if itself:
            _by_itself(reader, found, given, seen)
        else:
            children.run(reader, found, given, seen)
    except children.NotReadError as error:
        children.lost(reader, error)


def _text(
    reader: Reader, command: Mapping[str, str], rest: Sequence[str], line: int
) -> tuple[children.Commands, Sequence[str]]:
    """Return what a job runs, and its arguments."""
    if "wrap" in command:
        ambiguous = children.is_ambiguous(reader, [command["wrap"]], _WRAP)
        why = children.ambiguous(reader, "sbatch") if ambiguous else ""
        return children.Commands(command["wrap"], line=line, why=why), ()
    if rest:
        here = "*" not in command or find_file(rest[0], reader.beside(rest[0])) is not None
        return children.of_file(reader, rest[0] if here else command["*"], "sbatch"), rest[1:]
    with not_yet(reader):
        return children.of_input(reader, "sbatch", line), ()


def _environment(reader: Reader, options: Mapping[str, str]) -> children.Environment:
    """Return what a job has in its environment: what is exported, unless --export says otherwise."""
    ours = children.environment(reader).values
    parts = _exported(options.get("export", "ALL"))
    names = {part.partition("=")[0] for part in parts if "=" not in part}
    if {"*", "export-file"} & {*options} or any(map(is_unset, names)):
        why = f"may be set by sbatch in {reader.scope.place}, whose --export is not known before the script runs"
        return children.Environment({}, sourced=why)
    if "ALL" in names:
        values, sourced = dict(ours), None
    else:
        kept = names - {"NONE", "NIL"}
        values = {key: value for key, value in ours.items() if key.removeprefix("export ") in kept}
        sourced = ""
    for name, sign, value in (part.partition("=") for part in parts):
        if sign and name.isidentifier():
            values |= {name: _value(reader, value), f"export {name}": "1"}
    return children.Environment(values, sourced=sourced)


def _folders(reader: Reader, folder: str, begun: str) -> dict[str, Value]:
    """Return the folders of a job: that in which it is handed in, and the one of its commands, if that is another.

    `begun`: the folder in which the present script was taken to begin, though it hands itself in and is no job yet.
    """
    here = reader.scope.values.get(FOLDER, "")
    if begun and isinstance(here, str) and PurePath(here).is_relative_to(begun):
        here = os.path.relpath(here, begun)
    return moved({FOLDER: here, SUBMITTED: here}, *[folder] if folder else [])


def _value(reader: Reader, text: str) -> Value:
    """Return what a variable is set to, with the reason where that is the value of another one that is not known."""
    name = text.strip("${}") if re.fullmatch(r"\$(\w+|\{\w+\})", text) else ""
    held = reader.scope.held(name) if name else None
    return held if isinstance(held, Unknown) else text


def _by_itself(reader: Reader, found: children.Commands, given: Sequence[str], seen: children.Environment) -> None:
    """Follow a job that is the script itself, ``sbatch "$0"``: what it starts there is what the script starts."""
    if reader.submitting:
        return
    kept = reader.found, reader.possible, reader.certain
    reader.found, reader.possible, reader.certain, reader.submitting = [], [], True, True
    children.run(reader, found, given, seen)
    certain, possible = reader.own or ([], [])
    reader.own = ([*certain, *reader.found], [*possible, *reader.possible])
    reader.found, reader.possible, reader.certain = kept
    reader.submitting = False


def within(reader: Reader, node: Node) -> None:
    """Follow what substitutions in a statement do: ``ID=$(sbatch --parsable job.sh)``, ``X=$(sed -i ... c.yaml)``."""
    if node.type not in _SIMPLE or not re.search(rb"\$\(|`", node.text or b""):
        return
    starting = {name for name, body in reader.functions.items() if body is not None and RUNS.search(source_of(body))}
    if not starting and not _ACTS.search(node.text or b""):
        return
    body = node.child_by_field_name("body")
    if node.type == "redirected_statement" and body is not None and body.type != "command":
        return  # its statements are followed by themselves
    for inner in _substitutions(node):
        words = (source_of(child) for child in nodes(inner) if child.type == "command_name")
        names = {word.rpartition("/")[2] for word in words}
        runs = RUNS.search(source_of(inner)) is not None and any(map(_STARTERS.fullmatch, names))
        if "sbatch" in names or runs or names & starting:  # LOG=$(swift rlhf ...)
            apart(reader, inner.named_children)
        elif names & files.CHANGERS:
            recording, reader.recording = reader.recording, False
            try:
                apart(reader, inner.named_children)
            finally:
                reader.recording = recording


def _substitutions(node: Node) -> Iterator[Node]:
    """Yield the outermost $( ) in a statement."""
    for child in node.children:
        if child.type == "command_substitution":
            yield child
        else:
            yield from _substitutions(child)
