"""Tell the program of a command from its arguments, where the program itself is not known."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.importers import tables
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts import documents

_SIGN = "rlhf_type"  # which ms-swift alone has
# Options that launchers share with the projects: a program may follow their value.
_OF_LAUNCHERS = set(
    "gradient_accumulation_steps gradient_clipping mixed_precision debug deepspeed log_dir log_level output seed "
    "nnodes nproc_per_node num_processes num_machines node_rank master_addr master_port config config_file "
    "deepspeed_config local_rank tee run_name name use_cpu".split()
)
_PROJECTS = ("swift", "swift_hf", "trl")


class Program(NamedTuple):
    """Program of ms-swift that a command starts, by the places of its words."""

    launched: int  # of the program; what stands before it is the launcher's
    first: int  # of its arguments


def is_argument(option: str) -> bool:
    """Tell whether an option is an argument of a run, so that the words behind it are its values."""
    return option not in _OF_LAUNCHERS and any(tables.load(project).has(option) for project in _PROJECTS)


def of_swift(command: Command, place: Path, source: str | None) -> Program | None:
    """Return the program of a command whose arguments are those of ms-swift, which --rlhf_type shows; else None.

    `source`: the project, if it was named.
    """
    given = [(at, word[2:].partition("=")[0].replace("-", "_")) for at, word in enumerate(command.words)
             if word.startswith("--")]  # fmt: skip
    first = next((at for at, name in given if is_argument(name)), 0)
    if not first or source in ("trl", "verl") or not any(name == _SIGN for _, name in given):
        return None
    launched = first - 1 - (command.words[first - 1] == "rlhf")
    if launched < 0:
        return None
    word = command.words[launched]
    if word.startswith("-") or (word.endswith(".py") and _is_trls(command, place, word)):
        return None
    return Program(launched, first)


def table(command: Command, program: Program, source: str | None) -> tuple[str, str]:
    """Return the table that the arguments of a program of ms-swift are in, and what is to be told of it."""
    word, first = command.words[program.launched], program.first
    shown = " ".join((*command.words[:first], *(one for words in command.might.values() for one in words)))
    named = source if source in documents.SWIFTS else "swift"
    try:
        found = "swift" if "megatron" in shown.lower() else documents.of_swift(options(command.words[first:])[0], named)
    except ValueError:  # arguments of both
        if "swift" not in shown.lower():
            raise
        found = "swift_hf"
    name = "megatron rlhf" if found == "swift" else "swift rlhf"
    why = "what it starts is known only when the script runs" if is_unset(word) else "its own code is not read"
    note = f"{os.path.basename(word)}: {why}; --{_SIGN} is an argument of ms-swift, and {name} is taken for it"
    return found, note


def either(command: Command, program: Program) -> tuple[str, ...]:
    """Return both tables of ms-swift if a variable that the program stands in may be the one program or the other."""
    words = (*command.words[: program.first], *(one for words in command.might.values() for one in words))
    shown = " ".join(words).lower() if any(map(is_unset, command.words[: program.first])) else ""
    return ("swift", "swift_hf") if "megatron" in shown and re.search(r"\bswift\b", shown) else ()


def _is_trls(command: Command, place: Path, word: str) -> bool:
    """Tell whether a Python file that is at hand trains with TRL, and not with ms-swift."""
    try:
        text = documents.text_of(place, word, command.files) or ""
    except ValueError:
        return False
    return bool(re.search(r"\btrl\b", text)) and not re.search(r"\bswift\b", text)


def included(words: Sequence[str], given: Mapping[str, Any]) -> dict[str, str]:
    """Return num_gpus and num_nodes of ``deepspeed --include HOST:0,1@HOST:0,1``, which names GPUs one by one.

    `given`: the options among the words. Nothing where nodes have different numbers of GPUs, or the GPUs are not known.
    """
    named = given.get("include")
    if not isinstance(named, str) or not any(os.path.basename(word) == "deepspeed" for word in words):
        return {}
    counts = [len(re.findall(r"\d+", slots)) for _, _, slots in (host.partition(":") for host in named.split("@"))]
    if "$" in named or len({*counts}) != 1 or not counts[0]:
        return {}
    return {"num_gpus": str(counts[0]), "num_nodes": str(len(counts))}
