"""Write a project: files that a user changes into his own."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from gspo_hpc.config import paths
from gspo_hpc.config.schema import run_name
from gspo_hpc.data import counting
from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.inputs import read_text

FILES = paths.PACKAGE / "starter" / "files"
CONFIG, DATA, REWARD, TEST = "config.yaml", "train.jsonl", "reward.py", "test_reward.py"
_ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
_ROWS = 20


@dataclass(frozen=True)
class Project:
    """Files that were written, and what is to be said of them."""

    files: tuple[Path, ...]
    converted: Converted | None  # where the config came from another project's file
    notes: tuple[str, ...]  # what the user should look at


def write(folder: Path, source: Path | None = None, *, project: str | None = None, cuda: bool = False) -> Project:
    """Write a project into a folder, which is made if it is not there.

    `source`: a data file (.jsonl, .parquet), or a script or config of TRL, verl or ms-swift; `project` names which.
    `cuda`: whether the config is for a GPU. Raises ValueError if one of the files is there already, and if the source
    cannot be read; nothing is written then.
    """
    names = {"prompt": "prompt", "answer": "answer"}
    texts: dict[str, str] = {}
    notes: list[str] = []
    converted = None
    about = "This run learns to add numbers: replace its data and its reward with your own."
    if source is not None and source.suffix in counting.DATA_FILES:
        names, notes = _fields(source)
        about = f"This run trains on {source.name}."
    elif source is not None:
        converted = convert(read_text(source), project, None, None, source.parent, source.name)
    if source is None or converted is not None:
        texts[DATA] = _sums()
    if converted is None:
        train = DATA if source is None else os.path.relpath(source, folder)
        values = names | {"about": about, "name": _name(folder), "train": train}
        texts[CONFIG] = _filled("config_cuda.yaml" if cuda else "config_cpu.yaml", values)
    else:
        texts[CONFIG], more = _completed(converted)
        notes += more
        if DATA not in texts[CONFIG]:
            del texts[DATA]
    texts[REWARD], texts[TEST] = _filled(f"{REWARD}.txt", names), _filled(f"{TEST}.txt", names)
    if there := [name for name in texts if (folder / name).exists()]:
        are = "is" if len(there) == 1 else "are"
        raise ValueError(f"{folder}: {', '.join(there)} {are} there already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    return Project(tuple(folder / name for name in texts), converted, tuple(notes))


def _filled(name: str, values: dict[str, str]) -> str:
    """Return a file of the template with its names replaced."""
    return Template((FILES / name).read_text("utf-8")).substitute(values)


def _name(folder: Path) -> str:
    """Return the name of the run: that of the folder, as far as a run may be called so."""
    return run_name(folder.absolute().name) or "run"


def _fields(source: Path) -> tuple[dict[str, str], list[str]]:
    """Return which fields of a data file are prompt and answer, and what is to be looked at."""
    found = counting.fields(source)
    if found is None:
        raise ValueError(f"{source}: its first rows cannot be read: every line must be a JSON object")
    prompt = next((name for name in counting.PROMPT_FIELDS if name in found), None)
    answer = next((name for name in _ANSWERS if name in found and name != prompt), None)
    if prompt is None:
        raise ValueError(f"{source}: no field is a prompt; it has {', '.join(found)}: call one of them prompt")
    notes = [f"data.prompt_key is {prompt}; the fields of a row are {', '.join(found)}"]
    if answer is None:
        notes.append(f"no field is an answer: {REWARD} reads fields['answer'], which you have to change")
    else:
        notes.append(f"{REWARD} compares the last number of a completion with the field {answer}")
    return {"prompt": prompt, "answer": answer or "answer"}, notes


def _completed(converted: Converted) -> tuple[str, list[str]]:
    """Return a converted config with the data and the reward of this project where it has none."""
    text, notes = converted.text, []
    sections = {
        "data": (converted.config.data.train, f"data:\n  train: {DATA} # the data of the original is not known\n"),
        "reward": (
            converted.config.reward.functions,
            f"reward:\n  functions:\n    - function: {REWARD}:reward # that of the original is not known\n",
        ),
    }
    for name, (given, written) in sections.items():
        if given:
            continue
        if re.search(rf"^{name}:", text, re.MULTILINE):
            notes.append(f"{CONFIG}: section {name} is not complete; gspo-hpc plan says what is missing")
            continue
        config, remarks, rest = text.partition("\n#\n")  # what the conversion says follows the config
        text = f"{config.rstrip()}\n\n{written}{remarks}{rest}"
        notes.append(f"{CONFIG}: {name} is that of this project, for the original's is not known")
    return text, notes


def _sums() -> str:
    """Return rows of data: sums of two numbers up to 20, always the same."""
    draw = random.Random(0)
    rows = []
    for _ in range(_ROWS):
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        rows.append({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b})
    return "".join(f"{json.dumps(row)}\n" for row in rows)
