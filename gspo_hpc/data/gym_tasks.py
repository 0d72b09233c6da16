"""Tasks of reasoning-gym by name: reasoning_gym:TASK[+TASK...][,size=N][,seed=N][,OPTION=VALUE...].

The package (``gspo-hpc[reasoning-gym]``) makes rows from a seed. They are made once, in a process of their own whose
hashes of texts are fixed, because some tasks follow these, and are kept as a file of the user's cache. The config of a
run has the path of that file, so its nodes make none. A row has the prompt, `answer`, and in `reasoning_gym` what the
reward function of that name needs: name and options of the task, and its entry, in which tuples stay tuples.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.data.hub_data import TASKS as PREFIX
from gspo_hpc.system import environment
from gspo_hpc.system.files import write_atomically
from gspo_hpc.system.text import near_miss, parse_json

FIELD = "reasoning_gym"
INSTALL = "pip install 'gspo-hpc[reasoning-gym]'"
_FORM = f"{PREFIX}TASK[+TASK...][,size=N][,seed=N][,OPTION=VALUE...]"
_TASKS = re.compile(r"\w+(?:\+\w+)*")
_OPTION = re.compile(r"([A-Za-z_]\w*)=(.+)")
_SIZE, _SEED = 500, 0  # rows of all tasks together, and their seed, where a name does not say
_TUPLE = "__tuple__"


class Tasks(NamedTuple):
    """The tasks that a name stands for."""

    names: tuple[str, ...]
    size: int
    seed: int
    options: dict[str, Any]


def parsed(name: str) -> Tasks:
    """Return the tasks of a name. Raises ValueError for another form; the package is not asked whether they exist."""
    tasks, *given = name.removeprefix(PREFIX).split(",")
    if not _TASKS.fullmatch(tasks):
        raise ValueError(f"{name}: tasks are named as {_FORM}")
    options: dict[str, Any] = {}
    for part in given:
        match = _OPTION.fullmatch(part.strip())
        if match is None or match[1] in options:
            raise ValueError(f"{name}: {part!r} is no option, or the second of its name; tasks are named as {_FORM}")
        options[match[1]] = _value(match[2])
    size, seed = options.pop("size", _SIZE), options.pop("seed", _SEED)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: {key} is {value!r}: it must be a whole number from {least} on")
    return Tasks(tuple(tasks.split("+")), size, seed, options)


def kept(name: str) -> Path | None:
    """Return the file of these tasks if it has been made already."""
    path = _place(name)
    return path if path is not None and path.is_file() else None


def made(name: str) -> Path:
    """Return the file of these tasks, which is made if it is not there. Raises ValueError where that is impossible."""
    parsed(name)
    path = _place(name)
    if path is None:
        raise ValueError(f"{name}: reasoning-gym is not installed here: {INSTALL}")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            environment.python("gspo_hpc.data.gym_tasks", name, str(path)),
            env=os.environ | environment.importing() | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ValueError(f"{name}: {lines[-1]}")
    return path


def packed(value: Any) -> Any:
    """Return an entry of a task as JSON can hold it, from which :func:`unpacked` makes the same."""
    if isinstance(value, tuple):
        return {_TUPLE: [packed(one) for one in value]}
    if isinstance(value, list):
        return [packed(one) for one in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) and key != _TUPLE for key in value):
            raise TypeError("a key is not text")
        return {key: packed(one) for key, one in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if callable(getattr(value, "item", None)):  # a number of numpy
        return value.item()
    raise TypeError(f"a value is {type(value).__name__}")


def unpacked(value: Any) -> Any:
    """Return the entry that :func:`packed` was given."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if isinstance(value, Mapping):
        if value.keys() == {_TUPLE}:
            return tuple(unpacked(one) for one in value[_TUPLE])
        return {key: unpacked(one) for key, one in value.items()}
    return value


def _place(name: str) -> Path | None:
    """Return where the file of these tasks is kept: its name has that of the package's version; None without it."""
    try:
        version = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gspo_hpc" / "reasoning_gym"
    told = re.sub(r"[^\w.+=-]", "_", name.removeprefix(PREFIX))[:120]
    return home / version / f"{told}-{zlib.crc32(name.encode()):08x}.jsonl"


def _value(text: str) -> Any:
    try:
        return parse_json(text, finite=False)
    except ValueError:
        return text


def _write(name: str, path: Path) -> None:
    """Make the rows of a name, in turns of its tasks. Raises ValueError for what the package does not take."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    tasks = parsed(name)
    data = []
    for number, task in enumerate(tasks.names):
        if task not in DATASETS:
            raise ValueError(f"reasoning-gym has no task {task!r}{near_miss(task, sorted(DATASETS), known=True)}")
        size = tasks.size // len(tasks.names) + (number < tasks.size % len(tasks.names))
        try:
            data.append(reasoning_gym.create_dataset(task, size=size, seed=tasks.seed, **tasks.options))
        except (TypeError, AssertionError) as error:
            raise ValueError(f"{task} does not take these options: {error}") from None
    lines = []
    for index in range(tasks.size):
        task, one = tasks.names[index % len(data)], data[index % len(data)]
        entry = one[index // len(data)]
        try:
            own = {"task": task, "options": tasks.options, "entry": packed(entry)}
        except TypeError as error:
            raise ValueError(f"{task} cannot be kept as a file: {error}") from None
        row = {"prompt": entry["question"], "answer": str(entry["answer"]), FIELD: own}
        lines.append(json.dumps(row, ensure_ascii=False))
    write_atomically(path, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    try:
        _write(sys.argv[1], Path(sys.argv[2]))
    except ValueError as mistake:
        sys.exit(str(mistake))
