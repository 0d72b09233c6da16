"""Recognise the run that one command of a script starts, and read its arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_hpc.importers import report, tables
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.scripts.places import find_file, within
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts import documents, foreign, python_source, trl_kinds
from gspo_hpc.importers.texts.sources import Found
from gspo_hpc.importers.texts.trainers import TRAINER
from gspo_hpc.importers.texts.uses import modules, programs
from gspo_hpc.importers.texts.uses.arguments import run_of
from gspo_hpc.importers.texts.uses.beside import hands_on

_SWIFTS_MAIN = re.compile(r"(^|/)swift[./]cli[./](_megatron[./])?main(\.py)?$")
_OVERRIDE = re.compile(r"[+~]{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_model)\.[\w.]+=")
_OF_VERL = re.compile(r"\+?(actor_rollout_ref\.\w|algorithm\.adv_estimator=)")
_VERLS_ENTRY = re.compile(
    r"(^|\.)verl\.trainer\.main_ppo(_v0)?$|^(recipe\.)?dapo(\.src)?\.main_dapo$|^main_(ppo|dapo)$"
)
# Commands that a file of a run is an argument of, and that do not start it.
TOOLS = set(
    "sed awk cat cp mv rm ls ln chmod chown touch mkdir grep egrep head tail wc diff tee echo printf vim vi nano less "
    "more scp rsync git tar zip unzip find black ruff isort perl [ test export cd md5sum sha256sum stat file ps "
    "wget curl code dos2unix pip pip3 pytest pylint mypy flake8 source . aws truncate".split()
)
# Commands that look for a running process, or end it, by the file that it runs; also behind sudo, ssh or srun.
_PROCESSES = ("pkill", "pgrep", "killall", "pidof")
# Launchers, behind which the program is, and modules that prepare something for Python.
_NO_PROGRAM = re.compile(r"(torch\.distributed|accelerate|deepspeed)\.|(pip|venv|ensurepip|compileall)$")
# Modules of Python that read a file, or run what is in it as tests.
_READERS = set(
    "py_compile compileall ast tokenize pyflakes pylint flake8 black ruff isort mypy yapf bandit pytest unittest "
    "doctest".split()
)
_HUB = ("hf", "huggingface-cli")  # copies files, but behind `jobs` it starts what follows
NOT_AT_HAND = "is not at hand: its arguments are taken to be those of a GRPOConfig, and what it sets is not known"
_ELSEWHERE = "makes no GRPOConfig that is read: its YAML shows the run, and what other files of it set is not known"
_INSISTED = (
    "makes no GRPOConfig that is read: its arguments are taken for those of one, as --from trl says, and what it sets "
    "is not known"
)
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
    if _starts_nothing(words):
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
            return run_of(
                "swift", command, number, after if pair[-1] == "rlhf" else number + 1, commands, place, own=()
            )
        if pair == ("swift", "rlhf") or re.search(r"(^|[/.])cli[./]rl(hf|ft)(\.py)?$", word):
            return run_of(
                "swift_hf", command, number, after if pair[-1] == "rlhf" else number + 1, commands, place, own=()
            )
        if match := re.search(r"(^|/)swift/cli/(_megatron/)?(sft|pt)\.py$", word):
            program = "megatron" if match[2] else "swift"
            others.append(f"{word} is no reinforcement learning: convert reads {program} rlhf")
            return None
        if pair == ("trl", "grpo"):
            return run_of("trl", command, number, number + 2, commands, place, own=())
        if pair[0] == "trl" and len(pair) > 1 and (why := trl_kinds.other_trainer(" ".join(pair), "trl grpo")):
            others.append(why)
            return None
        if theirs and number == theirs.launched:
            table, note = programs.table(command, theirs, source)
            either = programs.either(command, theirs)
            found, *both = (run_of(one, command, number, theirs.first, commands, place, ()) for one in (table, *either))
            return found._replace(notes=(note, *found.notes), possible=tuple(both))
        if source in ("swift", *documents.SWIFTS) and word.endswith(".py") and _trains_with_trl(words[number + 1 :]):
            others.append(f"{word} has arguments of TRL, and no --rlhf_type, which ms-swift needs")
            return None
        module = re.sub(r"^\./|\.py$", "", word).replace("/", ".")
        if "=" not in word and _VERLS_ENTRY.search(module):
            return run_of("verl", command, number, number + 1, commands, place)
        entry = words[number - 1] in modules.FLAGS if number else False
        if entry and module == "trl.scripts.grpo":
            return run_of("trl", command, number, number + 1, commands, place, own=())
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
                return run_of("verl", command, number, number + 1, commands, place)
            others.append(_other_entry(word, words))
            return None
        begins = (entry or word.endswith(".py")) and "=" not in word
        if begins and any(map(_OF_VERL.match, words[number + 1 :])):
            if source == "verl":
                return run_of("verl", command, number, number + 1, commands, place)
            others.append(f"{word} is another trainer, with arguments of verl: --from verl takes it for main_ppo")
            return None
        if word.endswith(".py") and not word.startswith("-"):
            return _from_python_file(command, number, commands, place, source, others)
    return None


def python_program(words: Sequence[str]) -> str | None:
    """Return the Python file or module that a command starts behind its launchers; None for other commands."""
    if not words or any(os.path.basename(word) in _PROCESSES for word in words):
        return None
    if _starts_nothing(words):
        return None
    for number, word in enumerate(words):
        if number and words[number - 1] in modules.FLAGS and not _NO_PROGRAM.match(word):
            return word if modules.starts(words[: number - 1]) else None
        if word.endswith(".py") and not word.startswith("-") and "=" not in word:
            runs = modules.starts(words[:number]) if " " in word else modules.only_named((*words,)) is None
            return word if runs else None
    return None


def _starts_nothing(words: Sequence[str]) -> bool:
    """Tell whether a command starts none of the files that it names."""
    name = os.path.basename(words[0]) if words else ""
    if name in TOOLS or (name in _HUB and "jobs" not in words[1:2]):
        return True
    first = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
    return any(flag == "-m" and module in _READERS for flag, module in zip(words[:first], words[1:], strict=False))


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
    run, unread = None, ""
    try:
        text = documents.text_of(place, word, command.files)
    except ValueError as error:  # no text, or one that is not known
        text = None
        others.append(str(error))
    if text:
        try:
            run = python_source.read(text, find_file(word, place))
        except python_source.ParseError as error:
            unread = str(error)
        except foreign.ForeignRunError:
            raise
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    if run is not None:
        if run.values:  # its own arguments are not TRL's
            left = {f"--{name}": f"an argument of {word} itself" for name in given}
            note = f"the GRPOConfig in line {run.line} of {word} is read, and what is done with it; the rest is not"
            found = run_of("trl", command, number, len(command.words), commands, place)
            found = found._replace(values={**found.values, **run.values}, left={**found.left, **left}, notes=(note,))
            return documents.with_python(found, run, word)
        if run.parses:
            own = None if run.absent else run.own.names
            return documents.with_python(run_of("trl", command, number, number + 1, commands, place, own), run, word)
        if run.from_trl and run.absent and run.trainer == TRAINER:  # the class is one of GRPOConfigs
            return documents.with_python(run_of("trl", command, number, number + 1, commands, place), run, word)
        if run.from_trl and (why := trl_kinds.other_trainer(run.trainer, "a GRPOConfig")):
            others.append(f"{word}: {why}")
            return None
    name = os.path.basename(word)
    known = tables.load("trl").known & {*given}
    shown = _trains_with_trl(command.words[number + 1 :])
    likely = shown or re.search(r"grpo|gspo", name) is not None
    if source != "trl" and not known and not given.get("config"):
        if re.search(r"grpo|gspo", name) and modules.only_named(command.words) is None:
            others.append(f"{word} {UNTOLD}")
        return None
    beside = not (source == "trl" or (shown and text is None) or _BESIDE.search(name))
    theirs = beside and _of_yaml(given, place, command)
    if text is not None and source != "trl" and (likely or theirs) and not (theirs and hands_on(text)):
        others.append(f"{word}: {unread or python_source.why_not_read(run)}")
        return None
    if source == "trl" or likely or theirs:
        if _OTHER_TRAINERS.search(name):
            others.append(f"{word} is another trainer by its name; --from trl takes it for one with a GRPOConfig")
            if source != "trl":
                return None
        found = run_of("trl", command, number, number + 1, commands, place)
        told = trl_kinds.check(found.values, name, insisted=source == "trl")
        untold = NOT_AT_HAND if text is None else _ELSEWHERE if theirs else _INSISTED
        notes = (*found.notes, f"{word} {untold}", *told)
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
    return run_of(source, command, 0, 0, commands, place)
