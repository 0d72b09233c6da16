"""Recognise the run of another project in a text: a script, a list of arguments, YAML, or a Python file."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.importers import tables
from gspo_hpc.importers.inputs import options, read_yaml
from gspo_hpc.importers.scripts.builtins import emptied, launchers
from gspo_hpc.importers.scripts.builtins.sbatch import directives
from gspo_hpc.importers.scripts.parse import PLACEHOLDER, placeholders
from gspo_hpc.importers.scripts.script import Command, Script
from gspo_hpc.importers.scripts.shell import follow
from gspo_hpc.importers.texts import documents, foreign, python_source
from gspo_hpc.importers.texts.commands import NOT_AT_HAND, UNTOLD, Found, bare, from_command, python_program
from gspo_hpc.importers.texts.sources import ACCELERATE, SeveralRunsError
from gspo_hpc.importers.texts.uses import modules

_SCRIPT = re.compile(
    r"^#!.*sh\b|megatron\s+rlhf|swift\s+rlhf|\bverl[.]|main_ppo|accelerate\s+launch|trl\s+grpo|torchrun|"
    r"(?:^|\s)python3?\s|(?:^|\s)--[a-z]\w+[\s=]|"
    r"(?:^|\s)(?:\+{0,2})(?:data|actor_rollout_ref|algorithm|trainer)\.[\w.]+="
)
# What a Python script begins with, and neither a shell script nor YAML has.
_PYTHON = re.compile(
    r'\s*(?:r?"""[\s\S]*?"""\s*)?(?:from [\w.]+ import |import [\w.]+(?: as \w+)?(?:, [\w.]+)*\s*(?:\n|$))'
)
_TOML = re.compile(r"(?m)^\[\[?[A-Za-z_][\w.\"-]*\]\]?[ \t]*$")
_FENCE = re.compile(r"(?m)^(?:```|~~~)[\w{}. -]*$")
# Variables and options of a launcher that decide how many GPUs there are.
_SIZES = (
    "NNODES",
    "NPROC_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "nnodes",
    "nproc_per_node",
    "num_gpus",
    "num_nodes",
    "include",
    *ACCELERATE,
)
# Keys that a task file of SkyPilot has beside `run`.
_OF_TASKS = {"resources", "setup", "envs", "workdir", "file_mounts", "num_nodes"}
POSSIBLE = "the run stands behind a condition that is not known before the script runs: it is assumed to hold"
_MOST_TOLD = 3  # scripts that are not read
_ENTRIES = (
    "megatron rlhf --rlhf_type grpo ..., swift rlhf --rlhf_type grpo ..., python -m verl.trainer.main_ppo ..., "
    "trl grpo ... or a GRPOConfig"
)


def recognise(text: str, source: str | None, folder: Path, name: str = "", presumed: Collection[str] = ()) -> Found:
    """Return the one run in a text. `folder` and `name`: of its file. Raises ValueError with one line for a mistake.

    `presumed`: variables (@: the arguments) that whoever starts a shell script gives it, not known to what.
    """
    if not text.strip():
        raise ValueError("it is empty")
    if _is_page(text, name):
        raise ValueError(
            "this is a page or a notebook: convert one of the blocks of code in it, as a file or from standard input"
        )
    plain = _without_comments(text)
    if name.endswith(".py") or _PYTHON.match(plain) and not name.endswith((".sh", ".yaml", ".yml")):
        return _from_python(text, folder, name)
    if name.endswith(".toml") or (not name and _TOML.search(plain)):
        documents.refuse_toml(text)
    shell = name.endswith((".sh", ".bash", ".slurm", ".sbatch"))
    scripted = shell or (_SCRIPT.search(plain) and not name.endswith((".yaml", ".yml")))
    raw = None if scripted else read_yaml(text)
    if raw is not None:
        _refuse_task(raw)
        return documents.from_yaml(raw, source, folder, name, text)
    return _from_script(text, source, folder, name, presumed)


def _is_page(text: str, name: str) -> bool:
    """Tell whether a text is a page in Markdown or a notebook, in which code stands between other text."""
    if name.endswith((".md", ".mdx", ".markdown", ".rst", ".ipynb")):
        return True
    if text.lstrip().startswith("{") and '"cells"' in text and '"nbformat"' in text:
        return True
    return not name and not text.startswith("#!") and not _PYTHON.match(text) and len(_FENCE.findall(text)) > 1


def _refuse_task(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for a task file of SkyPilot, with the project that it starts where that is not converted."""
    run = raw.get("run")
    if not isinstance(run, str) or not _OF_TASKS & {*raw}:
        return
    try:
        script = follow(run)
    except ValueError:
        script = Script([], [])
    for command in (*script.commands, *script.possible):
        if project := foreign.of_words(command.words, options(command.words)[0]):
            raise foreign.refusal(project)
    if project := foreign.of_text(run):
        raise foreign.refusal(project)
    raise ValueError("this is a task of SkyPilot: put the commands under run into a script, and convert that")


def _from_python(text: str, folder: Path, name: str) -> Found:
    """Return the run of a Python file; of one that reads its command line, that of the command in its docstring."""
    place = folder / (name or "-")
    shown = python_source.command_shown(text, name, place)
    if not shown:
        return documents.from_python(text, place)
    found = _from_script(shown, "trl", folder, "")
    note = "the command in the docstring is read: the file takes its GRPOConfig from the command line"
    found = found._replace(notes=(note, *(line for line in found.notes if not line.endswith(NOT_AT_HAND))))
    if found.doubts or found.source != "trl":  # the command found the file itself
        return found
    return documents.with_python(found, python_source.read(text, place), "the file")


def _from_script(text: str, source: str | None, folder: Path, name: str, presumed: Collection[str] = ()) -> Found:
    found = _followed(text, source, folder, name, presumed)
    notes = () if presumed else tuple(_defaults_taken(found, text, source, folder, name))
    return found._replace(notes=(*found.notes, *notes))


def _defaults_taken(found: Found, text: str, source: str | None, folder: Path, name: str) -> Iterator[str]:
    """Yield what follows the defaults that a script has for variables of a batch system or a launcher."""
    code = re.sub(r"(?m)^\s*#.*$", "", text)
    for variable, value in directives(text).items():
        if re.search(rf"\$\{{?{variable}\b", code):
            yield f"${variable}: {value}, by a line #SBATCH; sbatch may be given another"
    for variable in found.defaulted:
        try:
            others: Sequence[Found] = [_followed(text, source, folder, name, (variable,))]
        except SeveralRunsError as error:
            others = error.runs
        except ValueError as error:
            yield f"${variable}: the script's default is taken; with another value it is refused: {error}"
            continue
        if names := dict.fromkeys(one for other in others for one in _differing(found, other, (variable,))):
            more = "a batch system or a launcher may set another value"
            yield f"${variable}: the script's default is taken, and decides {', '.join(names)}; {more}"


def _differing(one: Found, other: Found, variables: Container[str]) -> list[str]:
    """Return the arguments and sizes in which two runs differ; `variables`: those that only the test for it may set."""
    names = [key for key in {**one.values, **other.values} if one.values.get(key) != other.values.get(key)]
    for before, after in ((one.variables, other.variables), (one.launcher, other.launcher)):
        moved = [key for key in _SIZES if before.get(key) != after.get(key)]
        names += [key for key in moved if key not in variables or key in before]
    return list(dict.fromkeys(names))


def _followed(text: str, source: str | None, folder: Path, name: str, presumed: Collection[str] = ()) -> Found:
    script = follow(text, folder, name, presumed=presumed)
    others: list[str] = []
    beside: list[str] = []
    runs, lists = _runs(script, source, folder, name, others, beside)
    notes: list[str] = []
    if not runs and script.ended:  # the check that ends it is of arguments, say, which it is started without here
        where = script.ended
        script = follow(text, folder, name, exits=False, presumed=presumed)
        beside.clear()
        runs, lists = _runs(script, source, folder, name, others, beside)
        notes.append(f"started without arguments, the script ends in {where}: what follows is read all the same")
    if not runs:
        raise _nothing(text, others, script.not_read)
    if len(runs) > 1:
        raise SeveralRunsError(runs)
    (found,) = runs
    notes += (*script.told, *script.required)
    flag = "" if found.source == "verl" else "--"
    notes += emptied.told(script.emptied, {**found.values, **found.launcher}, flag, text)
    if script.blanks:
        lines = ", ".join(map(str, script.blanks))
        notes.append(
            f"line {lines}: a blank stands behind the backslash, and bash ends the command there: what follows is "
            "read as part of it all the same; take the blank out"
        )
    if "\\\r\n" in text:
        notes.append(
            "its lines end as on Windows (CR LF), and bash ends a command at a backslash in front of that: it is read "
            "as if they ended with LF, which dos2unix makes them"
        )
    notes += (f"{line} {PLACEHOLDER}" for line in placeholders(text))
    for more in lists:  # a command broken in two by a comment or a line without its backslash
        first = next(iter(more.values), "")
        line = (
            f"{first} and what follows stand apart from the command: taken as part of it; a comment, or a line without "
            "its \\, ends it before them, so that bash does not pass them"
        )
        found = found._replace(
            values=found.values | more.values, notes=(*found.notes, line), left={**found.left, **more.left}
        )
    notes += _cut_off(found, script.commands)
    perhaps: list[str] = []
    possible, _ = _runs(Script(script.possible, []), source, folder, name, others, perhaps)
    notes += _told_beside(
        others, [*beside, *(f"{word} (if a condition holds)" for word in perhaps if word not in beside)]
    )
    notes += script.not_read[:_MOST_TOLD]
    found = found._replace(missed=script.missed, defaulted=script.defaulted, possible=(*found.possible, *possible))
    return found._replace(notes=(*found.notes, *notes))


def _runs(
    script: Script, source: str | None, folder: Path, name: str, others: list[str], beside: list[str]
) -> tuple[list[Found], list[Found]]:
    """Return the runs of a script, and lists of arguments that stand alone.

    `others` gets why other commands are no runs, and `beside` the Python files and modules that they start.
    """
    commands = script.commands
    place = folder / (name or "-")
    around = [*commands, *script.possible]
    for command in (*commands, *script.possible):
        if project := foreign.of_words(command.words, options(command.words)[0]):
            raise foreign.refusal(project)

    def all_of(given: list[Command]) -> list[Found]:
        direct = (command for command in given if not _is_followed(command.words))
        found = [(command, from_command(command, around, place, source, others)) for command in direct]
        beside.extend(word for one, run in found if run is None and (word := python_program(one.words)))
        started = [(one, run) for one, run in found if run is not None]
        read = [one.words for one, _ in started if modules.only_named(one.words)]
        if 0 < len(read) < len(started):  # beside a run, a command that only names its file is none
            others.extend(f"{' '.join(words)} is taken to read that file, and not to start it" for words in read)
            started = [(one, run) for one, run in started if one.words not in read]
        return [run._replace(notes=(*run.notes, *one.files.told)) for one, run in started]

    runs = all_of(commands)
    if not runs:  # none that runs in any case: one that runs if a condition holds
        runs = [run._replace(notes=(*run.notes, POSSIBLE)) for run in all_of(script.possible)]
    if len(runs) > 1 or (not runs and others):  # arguments that stand apart are those of what is started
        return runs, []
    theirs = runs[0].source if runs else source
    theirs = next((name for name, table in documents.SWIFTS.items() if runs and table == theirs), theirs)
    found = (bare(command, commands, theirs, place) for command in commands)
    lists = [run for run in found if run is not None]
    if runs or not lists:
        return runs, lists
    return [documents.of_grpo(lists[0], name, folder, source)], lists[1:]


def _is_followed(words: Sequence[str]) -> bool:
    """Tell whether a command only gives text to a shell, whose commands are followed by themselves."""
    submitted = words[0].rpartition("/")[2] == "sbatch" and any(word.startswith("--wrap") for word in words)
    joined = words[0].rpartition("/")[2] == "ssh" and launchers.text_of_words(words)[0]
    return words[0] == "eval" or submitted or bool(joined)


def _nothing(text: str, others: Sequence[str], not_read: Sequence[str]) -> ValueError:
    """Return the error for a text without a run that is read. `not_read`: sentences on scripts that it starts."""
    if others:
        return ValueError(sorted(others, key=lambda line: line.endswith(UNTOLD))[0])
    if project := foreign.of_text(_without_comments(text)):
        return foreign.refusal(project)
    if not_read:
        return ValueError(f"no run of ms-swift, verl or TRL is recognised; {'; '.join(not_read[:_MOST_TOLD])}")
    return ValueError(f"no run of ms-swift, verl or TRL is recognised ({_ENTRIES}); name one with --from")


def _told_beside(others: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return what else a script starts, of which nothing is converted: why it is no run, or the programs of `words`."""
    told = list(dict.fromkeys(others))
    named = [word for word in dict.fromkeys(words) if not any(line.startswith(word.split(" (")[0]) for line in told)]
    if named:
        rest = f" and {len(named) - _MOST_TOLD} more" if len(named) > _MOST_TOLD else ""
        told.append(f"the script also starts {', '.join(named[:_MOST_TOLD])}{rest}, of which nothing is converted")
    return told


def _cut_off(found: Found, commands: list[Command]) -> Iterator[str]:
    """Yield commands whose arguments look like the run's: a ; & or | without quotes has cut them off."""
    known = tables.load(found.source).known
    for first, *words in (command.words for command in commands):
        given = [name for name in options(words)[0] if name in known]
        started = any(word.endswith(".py") or word in ("-m", "rlhf") for word in words)
        if len(given) > 1 and not started and words[0].startswith("--") and not first.startswith("-"):
            yield f"{first[:40]} {words[0]} ... is a command of its own to a shell: put quotes around text with ; & |"


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(?:^|(?<=\s))#(?!!).*$", "", text)
