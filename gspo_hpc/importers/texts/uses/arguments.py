"""Read the arguments of a command that starts a run: options, overrides of Hydra, and the YAML that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.config import yaml_text
from gspo_hpc.importers import tables
from gspo_hpc.importers.inputs import completed, flatten, options
from gspo_hpc.importers.scripts.expansion import open_words
from gspo_hpc.importers.scripts.places import plain_path
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts import documents
from gspo_hpc.importers.texts.sources import Found
from gspo_hpc.importers.texts.uses import handed_on, named_files, processes, programs
from gspo_hpc.importers.texts.uses.ends import EVALUATES

_NAMED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/:-]*=")
_OMITTED = ("...", "…", "[...]")  # as a page writes for what it leaves out
_HYDRA = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}  # of its flags those with a value
_ADDS = ("xargs", "parallel")  # add arguments to the command that they start


def run_of(
    source: str,
    command: Command,
    launched: int,
    first: int,
    commands: list[Command],
    place: Path,
    own: Collection[str] | None = None,
) -> Found:
    """Return the run of a command; `launched` of its words are the launcher's, and the arguments begin at `first`.

    `own`: the options that its parser has beside the project's, None if they are not known.
    """
    words, command = command.words, handed_on.followed(command, launched)
    variables, perhaps, notes = handed_on.environment(command, source)
    launcher, _ = options(words[:launched])
    for name, value in launcher.items():
        variables[name] = str(value[0] if isinstance(value, list) else value)
    variables = programs.included(words[:launched], launcher) | variables
    left: dict[str, str] = {}
    might, places = dict[str, tuple[str, ...]](), dict[str, str]()
    if omitted := next((word for word in words[first:] if word in _OMITTED), ""):
        words = (*words[:first], *(word for word in words[first:] if word not in _OMITTED))
        left[omitted] = "it stands for further arguments, which the example leaves out"
        notes.append(f"{omitted}: {left[omitted]}: give them, or their defaults count")
    if source == "verl":
        variables["entry"] = words[first - 1] if first else ""
        values = _overrides(words[first:], variables, left, places, place, command.files)
    else:
        values, before = options(words[first:])
        if own is not None:
            values, taken = completed(values, tables.load(source).known | {*own})
            notes += [f"--{name}: taken for --{whole}, which alone begins so" for name, whole in taken.items()]
        _positional(source, values, before, variables, left, places, place, command.files, command.might)
    for word in [word for word in left if left[word] == open_words.UNSET]:
        variable = match[1] if (match := open_words.VARIABLE.fullmatch(word)) else ""
        left[word] = open_words.why(word, command.unknown, command.variables)
        notes.append(f"{word}: {left[word]}")
        words_of = command.might.get(variable, ())
        lost = _names(words_of) if source == "verl" else [*options(words_of)[0]]
        if source == "verl":
            for name, _, value in (text.lstrip("+~").partition("=") for text in words_of if "=" in text):
                might[name] = (*might.get(name, ()), value)
            might |= {name: (*might[name], str(values[name])) for name in might if name in values}
        values |= dict.fromkeys(lost, word)
    if adds := next((word for word in words[:launched] if os.path.basename(word) in _ADDS), ""):
        values[f"* ({adds})"] = f"$({adds})"
    if source == "trl":
        if "trl" in re.split(r"[./]", words[launched]):  # its own script, which only trains
            variables |= {EVALUATES: "", "entry": "trl"}
        ranks, told = processes.started(words[:launched])
        notes += [told] if told else []
        variables |= {name: count for name, count in ranks.items() if name not in variables}
        values, variables = named_files.of_trl(command, place, values, variables, launcher, notes, left, places)
    unknown = {**perhaps, **command.unknown}
    found = Found(source, values, variables, commands, tuple(notes), left, unknown, launcher)
    return found._replace(might=might, places=places)


def _names(words: tuple[str, ...]) -> list[str]:
    return [word.lstrip("+~").partition("=")[0] for word in words if "=" in word]


def _positional(
    source: str,
    values: dict[str, Any],
    before: list[str],
    variables: dict[str, str],
    left: dict[str, str],
    places: dict[str, str],
    place: Path,
    written: Mapping[str, str | None],
    might: Mapping[str, tuple[str, ...]],
) -> None:
    """Read the words of a command line that belong to no option, and the YAML that it names."""
    if source.startswith("swift") and isinstance(values.get("config"), str):
        before = [*before, values.pop("config")]
    for word in before:
        if source.startswith("swift") and (word.endswith((".yaml", ".yml", ".json")) or plain_path(word) in written):
            given, set_there, in_vain = documents.swift_values(documents.named(place, word, written))
            documents.refuse_misspelt(word, given, source)
            places |= dict.fromkeys(given.keys() - values, word)
            own = dict(values)
            values.clear()  # the command's stay behind those of the file, as ms-swift puts them
            values |= {name: value for name, value in given.items() if name not in own} | own
            variables |= {name: value for name, value in set_there.items() if name not in variables}
            left |= in_vain
        elif is_unset(word):
            left[word] = open_words.UNSET
        elif word:
            left[word] = "no argument"
    open_words.apart(values, left, tables.load(source).read, might)


def _overrides(
    words: tuple[str, ...],
    variables: dict[str, str],
    left: dict[str, str],
    places: dict[str, str],
    place: Path,
    written: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return Hydra's overrides with values as YAML; `left` gets words that set nothing, `places` those of a file."""
    values: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if (flag := _HYDRA.get(name, name)).startswith("--"):
            if not equals and flag in _HYDRA.values():
                value = next(rest, "")
            variables[flag[2:].replace("-", "_")] = value
            if equals and "." in flag:
                raise ValueError(f"{word[:60]}: Hydra takes no dashes before an override, and ends: leave them out")
            if flag not in _HYDRA.values():
                left[word] = "no setting of the run"
        elif word.startswith("~"):
            gone = [key for key in values if key == name[1:] or key.startswith(f"{name[1:]}.")]
            for key in gone:
                del values[key]
            left[word] = f"taken out: {', '.join(gone)}" if gone else "nothing is given before it to take out"
        elif name.startswith("hydra.") or name.startswith("hydra/"):
            left[word] = "no setting of the run"
        elif equals and _NAMED.match(word):
            if name.startswith("+"):
                variables["added"] = f"{variables.get('added', '')} {name.lstrip('+')}"
            values |= _override(name.lstrip("+"), value)
        elif is_unset(word):
            left[word] = open_words.UNSET
        elif word.strip():
            raise ValueError(f"{word[:60]!r} is no override of verl: write name.of.key=value")
    given = {flag: variables[name] for flag in _HYDRA.values() if (name := flag[2:].replace("-", "_")) in variables}
    path, theirs = documents.hydra_file(given, variables, left, place, written)
    places |= dict.fromkeys(theirs.keys() - values, path)
    return documents.resolved(theirs | values, variables)


def _override(name: str, value: str) -> dict[str, Any]:
    """Return the settings that an override makes: one, or those of a mapping, which Hydra merges into the group."""
    table = tables.load("verl")
    group = any(key.startswith(f"{name}.") for key in table.known)
    whole = group or f"{name}.*" in table.free
    if group and value.startswith("{") and is_unset(value):
        raise ValueError(
            f"{name}={value[:40]}: a value in it is known only when the script runs: write {name}.KEY=value"
        )
    try:  # Hydra needs no blank behind the colon
        read = yaml_text.read(re.sub(r"([{,]\s*[\w.]+\s*):(?=\S)", r"\1: ", value) if whole else value)
    except ValueError:
        read = value
    if whole and isinstance(read, Mapping) and read:
        return {f"{name}.{key}": one for key, one in flatten(read)}
    return {name: value if is_unset(value) or isinstance(read, Mapping) else read}
