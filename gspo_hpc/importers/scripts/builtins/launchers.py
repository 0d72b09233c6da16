"""Follow what a launcher starts: ``srun ... bash -c "commands"``, also in a container or elsewhere, and scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts.builtins import children
from gspo_hpc.importers.scripts.heredocs import SHELLS
from gspo_hpc.importers.scripts.places import find_file
from gspo_hpc.importers.scripts.places import moved as moved_by
from gspo_hpc.importers.scripts.scope import Unknown, Value, is_unset

if TYPE_CHECKING:
    from gspo_hpc.importers.scripts.shell import Reader

# Launchers that hand their own environment on, and others.
_PASSING = frozenset("srun salloc nice numactl taskset timeout setsid stdbuf ionice chrt screen script".split())
_PASSING |= frozenset("uv conda mamba micromamba poetry pixi nsys flock unbuffer caffeinate".split())
_QUEUES = frozenset(("qsub", "bsub"))  # hand a script to a batch system
_SHELLS_OF = frozenset(("script", "su", "runuser"))  # give the text behind -c to a shell
_LAUNCHERS = _PASSING | _QUEUES | _SHELLS_OF
_LAUNCHERS |= frozenset("mpirun mpiexec apptainer singularity docker podman kubectl oc ray sudo ssh tmux".split())
_OF_SSH = "BbcDEeFIiJLlmOopQRSWw"  # letters of options with a value
_OPENING = ("new", "new-session", "neww", "new-window", "splitw", "split-window")  # tmux starts a shell with these
# Programs that may be given the word bash as an argument of their own.
_PROGRAM = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|ssh|echo|xargs|swift|megatron|trl")
# Commands that start nothing, whatever words they are given, or give a shell other words than these.
_WRITING = frozenset("echo printf cat tee grep sed awk git find parallel :".split())
_SIGNS = re.compile(r"^[A-Za-z_]\w*=|[;&|<>]|^(?:cd|export|source|\.|eval)$")  # that words are no plain command
_INPUT_OF = re.compile(r"\s*(?:bash|sh|dash|zsh)(?:\s+[-\w.]+)*\s*")
_SCRIPT = re.compile(r"[^=]\.(?:sh|bash|slurm|sbatch)$")
_FILE = re.compile(rf"{_SCRIPT.pattern}|\.py$")

_NODES = re.compile(r"(?:^| )(?:-N ?|--nodes[= ])(\S+)")
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


def _commands(words: Sequence[str]) -> list[str]:
    """Return the commands that a launcher gives to a shell with -c, and their arguments; nothing if it starts none."""
    for at in _shells(words) if words[0] != "ssh" else ():  # which makes one text of all its words
        options = next((n for n, option in enumerate(words[at + 1 :]) if option[:1] != "-"), len(words))
        given = words[at + 1 : at + 1 + options]
        texts = words[at + 1 + options :]
        plain = all(re.fullmatch(r"-[ceulx]+|--login", option) for option in given)
        if plain and texts and any("c" in option for option in given if option[1] != "-"):
            return [] if children.OWN_NAME.search(texts[0]) else [*texts]
    return []


def text_of_words(words: Sequence[str]) -> tuple[str, int]:
    """Return the commands that ssh or tmux gives to a shell as text, and the place of their first word.

    "" where they are one command, whose words are those of the launcher. What ssh has in several words is joined with
    blanks, and the other machine's shell reads it again.
    """
    program, rest = words[0].rpartition("/")[2], words[1:]
    given: Sequence[str] = ()
    if program == "ssh":
        given = _plain(_plain(rest, _OF_SSH)[1:], _OF_SSH)
    elif program == "tmux" and (rest := _plain(rest, "cfLST")):
        verb, *rest = rest
        if verb in _OPENING:
            given = _plain(rest, "ceFflnpstxy")
        elif verb in ("send", "send-keys") and rest[-1:] and rest[-1].lower() in ("enter", "c-m"):  # which are typed
            given = _plain(rest[:-1], "Nt")
    elif program in _SHELLS_OF:
        at = next((at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c|--command", word)), len(words))
        given = words[at + 1 : at + 2]
        return (given[0], at + 1) if given else ("", len(words))
    first = len(words) - len(given)
    if program == "ssh" and len(given) > 1 and any(_SIGNS.search(word) for word in given):
        return " ".join(given), first
    whole = len(given) == 1 and re.search(r"\S\s", given[0])
    return given[0] if whole else "", words.index(given[0]) if whole else first


def _plain(words: Sequence[str], valued: str) -> list[str]:
    """Return the words from the first on that is no option; `valued`: letters of options with a value."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        at = next((at for at, letter in enumerate(option[1:], 2) if letter in valued), 0)
        rest = rest[1:] if at == len(option) else rest
    return rest


def _shells(words: Sequence[str]) -> list[int]:
    """Return the places of the words that are shells which a launcher may start.

    A command that is not known starts a shell where an option, as in ``bash -c``, or a script follows its name.
    """
    names = [word.rpartition("/")[2] for word in words]
    known = names[0] in _LAUNCHERS
    if not known and (names[0] in _WRITING or _PROGRAM.fullmatch(names[0])):
        return []
    end = next((at for at, name in enumerate(names[1:], 1) if _PROGRAM.fullmatch(name)), len(names))
    return [at for at, name in enumerate(names[:end]) if name in SHELLS and (known or _is_start(words[at + 1 :]))]


def _is_start(words: Sequence[str]) -> bool:
    return bool(words) and bool(re.fullmatch(r"-[a-z]+|--login", words[0]) or _SCRIPT.search(words[0]))


def launched(reader: Reader, words: list[str], line: int) -> None:
    """Follow the commands that a launcher gives to a shell, and a script that is started by its name.

    Most launchers decide what that shell has in its environment. Text in double quotes has been expanded before: where
    an expansion in it is not known, every variable in it counts as not known.
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
    texts, places = _commands(words), _shells(words)
    text, first = ("", 0) if texts else text_of_words(words)
    try:
        if texts:
            mixed = children.is_ambiguous(reader, texts[:1], children.COMMANDS)
            found = children.Commands(texts[0], line=line, why=children.ambiguous(reader, words[0]) if mixed else "")
            children.run(reader, found, texts[2:], _environment(reader, words[: places[0]], "shell"))
        elif text and _INPUT_OF.fullmatch(text) and children.has_input(reader):  # ssh host 'bash -s' < i.sh
            children.shell(reader, text.split(), line, _environment(reader, words[:first], "shell"))
        elif text:
            mixed = is_unset(text) and children.is_mixed(reader, any(text == word for word in words))
            found = children.Commands(text, line=line, why=children.ambiguous(reader, words[0]) if mixed else "")
            children.run(reader, found, (), _environment(reader, words[:first], "shell"))
        elif places:
            given = words[places[0] :]
            if reader.document is not None or children.has_input(reader) or any(map(_SCRIPT.search, given)):
                children.shell(reader, given, line, _environment(reader, words[: places[0]]))
        elif words[0].rpartition("/")[2] in _QUEUES and children.has_input(reader):
            children.run(reader, children.of_input(reader, words[0], line), (), _environment(reader, words))
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
        named = _SCRIPT.search(word) and word[0] != "-"
        if named and (words[0].rpartition("/")[2] in _QUEUES or find_file(word, reader.beside(word)) is not None):
            return at
    return None


def _environment(reader: Reader, words: Sequence[str], what: str = "script") -> children.Environment:
    """Return what a shell behind a launcher has in its environment: that of most launchers is not known."""
    given, gone = handed_on(words)
    names = [word.rpartition("/")[2] for word in words]
    keeping = [name for name in names if name in _LAUNCHERS - _PASSING and not (name == "qsub" and "-V" in words)]
    decides = names[0] not in _LAUNCHERS or any(word.startswith("--export") for word in words)
    keeping += [names[0]] if decides else []
    if keeping:
        why = f"may be set by {keeping[0]}, which starts a {what} in {reader.scope.place}"
        seen = children.Environment({}, sourced=why)
    else:
        seen = children.environment(reader)
    if names[0] in ("srun", "salloc"):
        own = [name for name in seen.values if name.startswith("SLURM_")]
        seen = seen._replace(values={**seen.values, **dict.fromkeys(own, Unknown(f"is set by {names[0]}"))})
    nodes = _NODES.search(" ".join(words)) if names[0] == "srun" and "SLURM_NNODES" in reader.scope.batch else None
    if nodes:  # those of the step, of all that the job has
        batch = {name: value for name, value in reader.scope.batch.items() if name != "SLURM_NNODES"}
        seen = seen._replace(batch=batch | ({"SLURM_NNODES": nodes[1]} if nodes[1].isdecimal() else {}))
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
