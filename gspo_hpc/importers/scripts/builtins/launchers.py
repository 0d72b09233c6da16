"""Follow what a launcher starts: ``srun ... bash -c "commands"``, also in a container, and scripts by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins import children
from gspo_hpc.importers.scripts.heredocs import SHELLS
from gspo_hpc.importers.scripts.places import find_file
from gspo_hpc.importers.scripts.places import moved as moved_by
from gspo_hpc.importers.scripts.scope import Value

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

# Launchers that hand their own environment on, and others.
_PASSING = frozenset("srun nice numactl taskset timeout setsid stdbuf ionice chrt".split())
_LAUNCHERS = _PASSING | frozenset("mpirun mpiexec apptainer singularity docker podman sudo ssh".split())
# Programs that may be given the word bash as an argument of their own.
_PROGRAM = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|ray|ssh|echo|xargs|swift|megatron|trl")
_SCRIPT = re.compile(r"[^=]\.(?:sh|bash|slurm|sbatch)$")
_FILE = re.compile(rf"{_SCRIPT.pattern}|\.py$")
_OWN_NAME = re.compile(r"\$\{?(?:0|BASH_SOURCE)")  # it is not the name of the script in such a shell

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"-e|-x|--env|--setenv|-E|--unset|-u")  # of docker, mpirun, systemd-run and env, with a value
_ATTACHED = re.compile(r"(--env|--setenv|--export|--unset|-e|-u)=?(.+)", re.DOTALL)
_ASSIGNING = ("env", "sudo")  # take assignments as words of their own
# Options by which launchers enter a folder before they start a program.
_ENTERING = {
    "env": "-C|--chdir",
    "mpiexec": "--?wdir|--?wd",
    "mpirun": "--?wdir|--?wd",
    "srun": "-D|--chdir|--workdir",
    "sudo": "-D|--chdir",
    "uv": "--directory",
}


def text_of_shell(words: Sequence[str]) -> str:
    """Return the commands that a launcher gives to a shell with -c, an empty text if it starts none."""
    for at in _shells(words) if words[0] != "ssh" else ():  # which makes one text of all its words
        options = next((n for n, option in enumerate(words[at + 1 :]) if option[:1] != "-"), len(words))
        given = words[at + 1 : at + 1 + options]
        texts = words[at + 1 + options :]
        plain = all(re.fullmatch(r"-[ceulx]+|--login", option) for option in given)
        if plain and texts and any("c" in option for option in given if option[1] != "-"):
            return "" if _OWN_NAME.search(texts[0]) else texts[0]
    return ""


def _shells(words: Sequence[str]) -> list[int]:
    """Return the places of the words that are shells which a launcher may start."""
    names = [word.rpartition("/")[2] for word in words]
    if names[0] not in _LAUNCHERS:
        return []
    end = next((at for at, name in enumerate(names[1:], 1) if _PROGRAM.fullmatch(name)), len(names))
    return [at for at, name in enumerate(names[:end]) if name in SHELLS]


def launched(reader: Reader, words: list[str], line: int) -> None:
    """Follow the commands that a launcher gives to a shell, and a script that is started by its name.

    Most launchers decide what that shell has in its environment, and text in double quotes has been expanded before:
    every variable in it counts as not known.
    """
    with _in_folder(reader, words):
        _followed(reader, words, line)


@contextmanager
def _in_folder(reader: Reader, words: Sequence[str]) -> Iterator[None]:
    """Have commands run in the folder that a launcher enters for its program; its input is opened before that."""
    values, around = reader.scope.values, reader.around
    if _entered(words):
        reader.around = values if around is None else around
        reader.scope.values = values | moved(values, words)
    try:
        yield
    finally:
        reader.scope.values, reader.around = values, around


def moved(values: Mapping[str, Value], words: Sequence[str]) -> dict[str, Value]:
    """Return the folders among the values of a scope as the program of a command has them, if a launcher starts it."""
    return moved_by(values, *_entered(words))


def _entered(words: Sequence[str]) -> list[str]:
    """Return the folders that a launcher, and env behind it, enter one by one."""
    folders = list[str]()
    options = ""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in SHELLS or _PROGRAM.fullmatch(name) or (word[:1] != "-" and _FILE.search(word)):
            break  # the program, whose options are its own
        options = _ENTERING.get(name, options)
        if options and (match := re.fullmatch(rf"(?:{options})(?:=?(.+))?", word, re.DOTALL)):
            folders += [match[1]] if match[1] else words[at + 1 : at + 2]
    return folders


def _followed(reader: Reader, words: list[str], line: int) -> None:
    text, places = text_of_shell(words), _shells(words)
    try:
        if text:
            why, seen = children.ambiguous(reader, words[0]), children.Environment(moved(reader.scope.values, ()))
            children.run(reader, children.Commands(text, line=line, why=why), (), seen)
        elif places:
            given = words[places[0] :]
            reads = reader.document is not None or (
                reader.statement is not None and b"<" in (reader.statement.text or b"")
            )
            if reads or any(map(_SCRIPT.search, given)):
                children.shell(reader, given, line, _environment(reader, words[: places[0]]))
        elif _SCRIPT.search(words[0]):
            found = children.by_first_line(reader, children.of_file(reader, words[0], ""))
            children.run(reader, found, words[1:], children.environment(reader))
        elif (at := _script(reader, words)) is not None:
            found = children.by_first_line(reader, children.of_file(reader, words[at], words[0]))
            children.run(reader, found, words[at + 1 :], _environment(reader, words[:at]))
    except children.NotReadError as error:
        children.lost(reader, error)


def _script(reader: Reader, words: Sequence[str]) -> int | None:
    """Return the place of the script that a launcher starts by its name, None if there is none at hand."""
    if words[0].rpartition("/")[2] not in _LAUNCHERS:
        return None
    for at, word in enumerate(words):
        if _PROGRAM.fullmatch(word.rpartition("/")[2]):
            break
        if _SCRIPT.search(word) and word[0] != "-" and find_file(word, reader.beside(word)) is not None:
            return at
    return None


def _environment(reader: Reader, words: Sequence[str]) -> children.Environment:
    """Return what a shell behind a launcher has in its environment: that of most launchers is not known."""
    place = reader.scope.place
    given, gone = handed_on(words)
    passes = words[0].rpartition("/")[2] in _PASSING and not any(word.startswith("--export") for word in words)
    seen = children.environment(reader) if passes else None
    if seen is None:
        seen = children.Environment({}, sourced=f"may be set by {words[0]}, which starts a script in {place}")
    lost = {*gone, *(f"export {name}" for name in gone)}
    values = {name: value for name, value in seen.values.items() if name not in lost} | given
    values |= moved(reader.scope.values, ())
    return seen._replace(values=values | {f"export {name}": "1" for name in given})


def handed_on(words: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return the variables that the words before a program set for it, and those that they take away."""
    given, gone = dict[str, str](), set[str]()
    program = ""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        before = words[at - 1] if at else ""
        if name in _ASSIGNING or (program == "" and at == 0):
            program = name
        elif match := _ASSIGNMENT.fullmatch(word):
            if program in _ASSIGNING or _OPTION.fullmatch(before):
                given[match[1]] = match[2]
        elif program == "env" and before in ("-u", "--unset") and word.isidentifier():
            gone.add(word)
        elif match := _ATTACHED.fullmatch(word):
            option, value = match[1], match[2]
            if option == "--export":
                given |= {found[1]: found[2] for part in value.split(",") if (found := _ASSIGNMENT.fullmatch(part))}
            elif option in ("--unset", "-u"):
                gone |= {value} if program == "env" and value.isidentifier() else set()
            elif found := _ASSIGNMENT.fullmatch(value):
                given[found[1]] = found[2]
    return given, gone - given.keys()
