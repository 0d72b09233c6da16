"""Find what a command starts: the file of a module behind -m, or a Python file, and not one that it only reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo_hpc.importers import tables
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.scripts.places import find_file, plain_path

FLAGS = ("-m", "--module")
_STARTERS = re.compile(r"python[\d.]*|accelerate|accelerate-launch|torchrun|deepspeed|torch\.distributed\.\w+")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Programs that are read elsewhere, and launchers, behind which the program is.
_READ_ELSEWHERE = re.compile(r"(^|\.)(verl|recipe|swift|megatron|trl|vllm|sglang)\.|^(torch|accelerate|deepspeed)\.")
# Modules behind `python -m` that run the file behind them, and programs that run one without python in front.
_RUNNING = re.compile(
    r"(torch\.(distributed|utils)|accelerate|deepspeed|coverage|debugpy|IPython)(\.|$)|"
    r"(i?pdb|pudb|cProfile|profile|trace|runpy|memory_profiler|kernprof|viztracer|scalene|memray|pyinstrument)(\.|$)"
)
_RUNNERS = frozenset(
    "srun mpirun mpiexec nice numactl taskset timeout setsid stdbuf sudo env time nohup exec sbatch uv poetry pdm rye "
    "hatch pipenv pixi conda mamba micromamba coverage kernprof viztracer scalene memray ipython run horovodrun "
    "hf jobs ray job submit launch modal".split()
)
_OVERRIDE = re.compile(r"\+{0,2}[\w.]+\.\w+=")  # of Hydra


def starts(words: Sequence[str]) -> bool:
    """Tell whether a program that runs modules is among the words in front of -m."""
    return any(_STARTERS.fullmatch(os.path.basename(word)) for word in words)


def file_of(words: tuple[str, ...], number: int, place: Path, written: Mapping[str, str | None]) -> str | None:
    """Return the path of the module that a word names, None if it names none, or one that is no file of a run of TRL.

    Where the file is not at hand, it is taken for one if it is what the command ends with, and its arguments are known.
    """
    module, after = words[number], words[number + 1 :]
    if not number or words[number - 1] not in FLAGS or not _MODULE.fullmatch(module) or _READ_ELSEWHERE.search(module):
        return None
    if not starts(words[: number - 1]) or any(map(_OVERRIDE.match, after)):
        return None
    path = module.replace(".", "/")
    for name in (f"{path}.py", f"{path}/__main__.py"):
        if plain_path(name) in written or find_file(name, place) is not None:
            return name
    further = any(word.endswith(".py") or word in FLAGS for word in after)  # a launcher, as torch.distributed.run is
    given = {*options(after)[0]}
    return f"{path}.py" if not further and given & {*tables.load("trl").known, "config"} else None


def only_named(words: tuple[str, ...]) -> str | None:
    """Return the Python file that a command names, if another program reads, checks or copies it.

    None if it runs: Python, or a launcher of it, stands in front, or nothing but launchers and their options do. A
    command that gives the file arguments of a run starts it, whatever the program is called.
    """
    number = next((at for at, word in enumerate(words) if word.endswith(".py") and word[:1] != "-"), None)
    if number is None or {*options(words[number + 1 :])[0]} & tables.load("trl").known:
        return None
    before = words[:number]
    if any(map(_OVERRIDE.match, words[number + 1 :])):
        return None
    if starts(before):
        module = _module(before)
        return words[number] if module and not _RUNNING.match(module) else None
    plain = [word for last, word in zip(("", *before), before, strict=False) if "-" not in (word[:1], last[:1])]
    return words[number] if {os.path.basename(word) for word in plain} - _RUNNERS else None


def _module(words: Sequence[str]) -> str:
    """Return the module that python is told to run by -m, with or without a blank behind it; "" if it is told none."""
    names = [re.fullmatch(r"python[\d.]*", os.path.basename(word)) is not None for word in words]
    for at in range(names.index(True) + 1 if True in names else len(words), len(words)):
        if (word := words[at]) == "-m":
            return "".join(words[at + 1 : at + 2])
        if word.startswith("-m"):
            return word[2:]
    return ""
