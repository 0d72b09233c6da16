"""Count the processes that mpirun or srun starts, where no launcher of PyTorch stands behind it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gspo_hpc.importers.scripts.scope import is_unset

_OF_MPI = ("mpirun", "mpiexec", "orterun", "prun")
_OF_PYTORCH = re.compile(
    r"torchrun|accelerate(?:-launch)?|deepspeed|torch\.distributed\.\w+|accelerate\.commands\.launch"
)
_COUNT = {**dict.fromkeys(_OF_MPI, r"-np?|--np?|-c"), "srun": r"-n|--ntasks"}
_NODES = {"srun": r"-N|--nodes"}
_EACH = {**dict.fromkeys(_OF_MPI, r"--?ppn|--?npernode|-N"), "srun": r"--ntasks-per-node"}
_HOSTS = r"-H|--?hosts?"


def started(words: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return num_processes and num_machines as the words before a program give them to mpirun or srun, and a note.

    Nothing where torchrun, accelerate or deepspeed starts the processes.
    """
    names = [os.path.basename(word) for word in words]
    program = next((name for name in names if name in _COUNT), "")
    if not program or any(map(_OF_PYTORCH.fullmatch, names)):
        return {}, ""
    given = words[names.index(program) + 1 :]
    hosts = [host for host in _value(given, _HOSTS).split(",") if host] if program != "srun" else []
    slots = [int(host.partition(":")[2]) for host in hosts if host.partition(":")[2].isdecimal()]
    nodes = _value(given, _NODES.get(program, "")) or (str(len(hosts)) if hosts else "")
    each, count = _value(given, _EACH[program]), _value(given, _COUNT[program])
    if not count and each.isdecimal() and nodes.isdecimal():
        count = str(int(each) * int(nodes))
    if not count and hosts and len(slots) == len(hosts):
        count = str(sum(slots))
    if not count or is_unset(count) or not count.isdecimal():
        what = f"how many processes {program} starts is not known from its words"
        return {}, f"{what}: give --gpus N"
    found = {"num_processes": count}
    if nodes.isdecimal() and int(count) % int(nodes or 1) == 0:
        found["num_machines"] = nodes
    note = (
        f"{program} starts {count} processes, which are taken for the ranks: they train together only if LOCAL_RANK, "
        "RANK and WORLD_SIZE are set for each"
    )
    return found, note


def _value(words: Sequence[str], names: str) -> str:
    """Return the value of an option: behind it, behind a =, or right behind its letter."""
    if not names:
        return ""
    for word, after in zip(words, [*words[1:], ""], strict=False):  # one blank more where there are no words
        if re.fullmatch(names, word):
            return after
        if match := re.fullmatch(rf"(?:{names})=(.+)", word) or re.fullmatch(r"(-[nNH])(\d+|\S+:\S+)", word):
            if match.lastindex == 1:
                return match[1]
            if re.fullmatch(names, match[1]):
                return match[2]
    return ""
