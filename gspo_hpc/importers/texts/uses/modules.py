"""Find the file of a module that a command starts by its name, as Python does behind -m."""

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
