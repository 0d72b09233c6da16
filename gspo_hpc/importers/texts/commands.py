"""Recognise the run that one command of a script starts, and read its arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_hpc.config import yaml_text
from gspo_hpc.importers import report, tables
from gspo_hpc.importers.inputs import flatten, options
from gspo_hpc.importers.scripts.expansion import open_words
from gspo_hpc.importers.scripts.places import find_file, plain_path, within
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts import documents, foreign, python_source, trl_kinds
from gspo_hpc.importers.texts.sources import Found
from gspo_hpc.importers.texts.trainers import TRAINER
from gspo_hpc.importers.texts.uses import handed_on, modules, named_files, processes, programs
from gspo_hpc.importers.texts.uses.ends import EVALUATES

_SWIFTS_MAIN = re.compile(r"(^|/)swift[./]cli[./](_megatron[./])?main(\.py)?$")
_OVERRIDE = re.compile(r"[+~]{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_model)\.[\w.]+=")
_NAMED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/:-]*=")
_OF_VERL = re.compile(r"\+?(actor_rollout_ref\.\w|algorithm\.adv_estimator=)")
_OMITTED = ("...", "…", "[...]")  # as a page writes for what it leaves out
_HYDRA = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}  # of its flags those with a value
_VERLS_ENTRY = re.compile(
    r"(^|\.)verl\.trainer\.main_ppo(_v0)?$|^(recipe\.)?dapo(\.src)?\.main_dapo$|^main_(ppo|dapo)$"
)
# Commands that a file of a run is an argument of, and that do not start it.
TOOLS = set(
    "sed awk cat cp mv rm ls ln chmod chown touch mkdir grep egrep head tail wc diff tee echo printf vim vi nano less "
    "more scp rsync git tar zip unzip find black ruff isort perl [ test export cd md5sum sha256sum stat file ps".split()
)
# Commands that look for a running process, or end it, by the file that it runs; also behind sudo, ssh or srun.
_PROCESSES = ("pkill", "pgrep", "killall", "pidof")
_ADDS = ("xargs", "parallel")  # add arguments to the command that they start
NOT_AT_HAND = "is not at hand: its arguments are taken to be those of a GRPOConfig, and what it sets is not known"
_ELSEWHERE = "makes no GRPOConfig that is read: its YAML shows the run, and what other files of it set is not known"
UNTOLD = "is started without an argument of TRL that says how to train, and makes no GRPOConfig that is read"
_OTHER_TRAINERS = re.compile(r"(?i)(^|[/_.-])(dpo|sft|ppo|kto|orpo|rloo|reward|gkd|online_dpo|xpo|bco)([/_.-]|$)")
# Scripts that read the YAML of a run and do not train.
_BESIDE = re.compile(
    r"(?i)eval|test|infer|generat|push|upload|merge|plot|export|serve|convert|prepare|sample|filter|data"
)


def from_command(
    command: Command, commands: list[Command], place: Path, source: str | None, others: list[str]
) -> Found | None:
    """Return the run that a command starts, None if it starts none.

    `place`: the script's file; `source`: the project, if it was named; `others` gets what else a command starts.
    """
    words, place = command.words, within(place, command.folder)
    if words and os.path.basename(words[0]) in TOOLS:
        return None
    theirs = programs.of_swift(command, place, source)
    option = ""
    for number, word in enumerate(words):
        option = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else option
        if not word.startswith("--") and programs.is_argument(option):  # no value of a run's argument starts one
            continue
        if os.path.basename(word) in _PROCESSES:
            return None
        program = _program(word)
        pair = (program, *words[number + 1 : number + 2])
        after = number + 1 + (len(pair) > 1 and not program.endswith(".py"))
        if pair[0] in ("megatron", "swift") and pair[-1] in ("sft", "pt", "sample", "rollout", "deploy", "infer"):
            if pair[-1] in ("sft", "pt"):
                others.append(f"{' '.join(pair)} is no reinforcement learning: convert reads {pair[0]} rlhf")
            return None
        if pair == ("megatron", "rlhf") or re.search(r"_megatron[./]rlhf(\.py)?$", word):
            return _make("swift", command, number, after if pair[-1] == "rlhf" else number + 1, commands, place)
        if pair == ("swift", "rlhf") or re.search(r"(^|[/.])cli[./]rl(hf|ft)(\.py)?$", word):
            return _make("swift_hf", command, number, after if pair[-1] == "rlhf" else number + 1, commands, place)
        if match := re.search(r"(^|/)swift/cli/(_megatron/)?(sft|pt)\.py$", word):
            program = "megatron" if match[2] else "swift"
            others.append(f"{word} is no reinforcement learning: convert reads {program} rlhf")
            return None
        if pair == ("trl", "grpo"):
            return _make("trl", command, number, number + 2, commands, place)
        if pair[0] == "trl" and len(pair) > 1 and (why := trl_kinds.other_trainer(" ".join(pair), "trl grpo")):
            others.append(why)
            return None
        if theirs and number == theirs.launched:
            table, note = programs.table(command, theirs, source)
            either = programs.either(command, theirs)
            found, *both = (_make(one, command, number, theirs.first, commands, place) for one in (table, *either))
            return found._replace(notes=(note, *found.notes), possible=tuple(both))
        if source in ("swift", *documents.SWIFTS) and word.endswith(".py") and _trains_with_trl(words[number + 1 :]):
            others.append(f"{word} has arguments of TRL, and no --rlhf_type, which ms-swift needs")
            return None
        module = re.sub(r"^\./|\.py$", "", word).replace("/", ".")
        if "=" not in word and _VERLS_ENTRY.search(module):
            return _make("verl", command, number, number + 1, commands, place)
        entry = words[number - 1] in modules.FLAGS if number else False
        if entry and module == "trl.scripts.grpo":
            return _make("trl", command, number, number + 1, commands, place)
        if entry and module.startswith("trl.") and (why := trl_kinds.other_trainer(module, "trl.scripts.grpo")):
            others.append(why)
            return None
        if file := modules.file_of(words, number, place, command.files):
            moved = replace(command, words=(*words[: number - 1], file, *words[number + 1 :]))
            return _from_python_file(moved, number - 1, commands, place, source, others)
        if not entry and word.endswith(".py") and not word.startswith("-") and _trains_with_trl(words[number + 1 :]):
            return _from_python_file(command, number, commands, place, source, others)
        if (
            "=" not in word
            and (entry or word.endswith(".py"))
            and re.search(r"(^|\.)(verl|recipe)\.|main_\w+$", module)
        ):
            if source == "verl":
                return _make("verl", command, number, number + 1, commands, place)
            others.append(_other_entry(word, words))
            return None
        begins = (entry or word.endswith(".py")) and "=" not in word
        if begins and any(map(_OF_VERL.match, words[number + 1 :])):
            if source == "verl":
                return _make("verl", command, number, number + 1, commands, place)
            others.append(f"{word} is another trainer, with arguments of verl: --from verl takes it for main_ppo")
            return None
        if word.endswith(".py") and not word.startswith("-"):
            return _from_python_file(command, number, commands, place, source, others)
    return None


def _program(word: str) -> str:
    """Return the name of the program that a word starts; swift/cli/main.py is what the program swift runs."""
    if match := _SWIFTS_MAIN.search(word):
        return "megatron" if match[2] else "swift"
    return os.path.basename(word)


def _trains_with_trl(words: tuple[str, ...]) -> bool:
    """Tell whether the arguments of a Python file show that it trains with TRL's GRPO."""
    known = tables.load("trl").known & {*options(words)[0]}
    return len(known) > 3 and bool(trl_kinds.signs(known)) and not any(map(_OVERRIDE.match, words))


def _other_entry(word: str, words: tuple[str, ...]) -> str:
    """Return why a Python module that is started is not read."""
    if re.search(r"fully_async|one_step_off|async_flow", word):
        why = report.AHEAD
    elif re.search(r"sft|generation|eval|model_merger|server", word):
        why = "does no reinforcement learning"
    else:
        why = "is another trainer: convert reads verl.trainer.main_ppo and recipe.dapo.main_dapo"
        why += "; --from verl takes it for the first" if any(map(_OVERRIDE.match, words)) else ""
    return f"{word} {why}"


def _from_python_file(
    command: Command, number: int, commands: list[Command], place: Path, source: str | None, others: list[str]
) -> Found | None:
    """Return the run of a Python file that a command starts: of TRL, if the file or its arguments show that."""
    word = command.words[number]
    given = options(command.words[number + 1 :])[0]
    text: str | None = ""
    run = None
    try:
        text = documents.text_of(place, word, command.files)
    except ValueError as error:  # no text, or one that is not known
        text = None
        others.append(str(error))
    if text:
        try:
            run = python_source.read(text, find_file(word, place))
        except python_source.ParseError:
            pass
        except foreign.ForeignRunError:
            raise
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    if run is not None:
        if run.values:  # its own arguments are not TRL's
            left = {f"--{name}": f"an argument of {word} itself" for name in given}
            note = f"the GRPOConfig in line {run.line} of {word} is read, and what is done with it; the rest is not"
            found = _make("trl", command, number, len(command.words), commands, place)
            found = found._replace(values={**found.values, **run.values}, left={**found.left, **left}, notes=(note,))
            return documents.with_python(found, run, word)
        if run.parses:
            return documents.with_python(_make("trl", command, number, number + 1, commands, place), run, word)
        if run.from_trl and run.absent and run.trainer == TRAINER:  # the class is one of GRPOConfigs
            return documents.with_python(_make("trl", command, number, number + 1, commands, place), run, word)
        if run.from_trl and (why := trl_kinds.other_trainer(run.trainer, "a GRPOConfig")):
            others.append(f"{word}: {why}")
            return None
    name = os.path.basename(word)
    known = tables.load("trl").known & {*given}
    shown = _trains_with_trl(command.words[number + 1 :])
    if source != "trl" and not known and not given.get("config"):
        if re.search(r"grpo|gspo", name):
            others.append(f"{word} {UNTOLD}")
        return None
    theirs = not (source == "trl" or shown or _BESIDE.search(name)) and _of_yaml(given, place, command)
    if source == "trl" or re.search(r"grpo|gspo", name) or shown or theirs:
        if _OTHER_TRAINERS.search(name):
            others.append(f"{word} is another trainer by its name; --from trl takes it for one with a GRPOConfig")
            if source != "trl":
                return None
        found = _make("trl", command, number, number + 1, commands, place)
        told = trl_kinds.check(found.values, name, insisted=source == "trl")
        untold = f"{word} {NOT_AT_HAND}" if text is None else f"{word} {_ELSEWHERE}" if theirs else ""
        notes = (*found.notes, *filter(None, (untold,)), *told)
        return documents.with_python(found._replace(notes=notes), run, word)
    others += _why_not_grpo(command, number, place)
    return None


def _of_yaml(given: Mapping[str, Any], place: Path, command: Command) -> bool:
    """Tell whether the YAML that a command names shows a run of GRPO, as it does where it is converted by itself."""
    file = given.get("config")
    if not isinstance(file, str) or not file.endswith((".yaml", ".yml")):
        return False
    try:
        theirs = documents.named(place, file, command.files)
        return documents.nearest_project(theirs) == "trl" and documents.from_yaml(theirs, None, place, file) is not None
    except ValueError:  # it is not at hand, no YAML, of another project, or does not show whose it is
        return False


def _why_not_grpo(command: Command, number: int, place: Path) -> list[str]:
    """Return why the arguments of a Python file, and of the YAML that they name, show no GRPO if they are TRL's."""
    word, given = command.words[number], options(command.words[number + 1 :])[0]
    if isinstance(file := given.get("config"), str) and file.endswith((".yaml", ".yml")):
        try:
            given = documents.named(place, file, command.files) | given
        except ValueError:  # it is not at hand, or no YAML
            pass
    if len(tables.load("trl").known & {*given}) < 4 or any(map(_OVERRIDE.match, command.words)):
        return []
    try:
        trl_kinds.check(given, os.path.basename(word))
    except ValueError as error:
        return [f"{word}: {error}"]
    return []


def bare(command: Command, commands: list[Command], source: str | None, place: Path) -> Found | None:
    """Return the run of a list of arguments without a command; `source`: the project that the arguments are of."""
    words = command.words
    if not (_OVERRIDE.match(words[0]) or (words[0].startswith("--") and len(words) > 1)):
        return None
    if source is None:
        overrides = any(_OVERRIDE.match(word) for word in words)
        source = "verl" if overrides else documents.nearest_project(options(words)[0])
    if source == "swift" or source in documents.SWIFTS:
        source = documents.of_swift(options(words)[0], source)
    return _make(source, command, 0, 0, commands, place)


def _make(source: str, command: Command, launched: int, first: int, commands: list[Command], place: Path) -> Found:
    """Return the run of a command; `launched` of its words are the launcher's, and the arguments begin at `first`."""
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
