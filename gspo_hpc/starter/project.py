"""Write a project: files that a user changes into his own."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from string import Template

from gspo_hpc.config import paths
from gspo_hpc.config.schema import run_name
from gspo_hpc.data import counting
from gspo_hpc.data.files import formats
from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.inputs import read_text
from gspo_hpc.starter.script import completed, is_given

FILES = paths.PACKAGE / "starter" / "files"
CONFIG, DATA, REWARD, TEST = "config.yaml", "train.jsonl", "reward.py", "test_reward.py"
_VERL_ANSWER = ("reward_model", "ground_truth")
_ROWS = 20
# Data that pandas reads, and how; no script and no config is called so.
_TABLES = {
    ".feather": "read_feather('{}')",
    ".xlsx": "read_excel('{}')",
}
# Options of convert, and what does the same in a project.
_OPTIONS = {
    "give --gpus N": "set cluster.nodes and cluster.gpus_per_node",
    "give --rows N": "set run.max_steps",
    "--from": "--project",
}


@dataclass(frozen=True)
class Project:
    """Files that were written, and what is to be said of them."""

    files: tuple[Path, ...]
    converted: Converted | None  # where the config came from another project's file
    notes: tuple[str, ...]  # what the user should look at
    warnings: tuple[str, ...] = ()  # what the conversion assumed, and what the plan of its config warns of


def write(folder: Path, source: Path | None = None, *, project: str | None = None, cuda: bool = False) -> Project:
    """Write a project into a folder, which is made if it is not there.

    `source`: a data file, the folder of a dataset, or a script or config of TRL, verl or ms-swift; `project` names
    which. `cuda`: whether the config is for a GPU. Raises ValueError if one of the files is there already, and if the
    source cannot be read; nothing is written then.
    """
    row = _Row("prompt", ("answer",))
    texts: dict[str, str] = {}
    notes: list[str] = []
    warnings: list[str] = []
    converted, own = None, None
    about = "This run learns to add numbers: replace its data and its reward with your own."
    if source is not None and (formats.kind(source) is not None or source.is_dir()):
        row, notes = _fields(source)
        about = f"This run trains on {source.name}."
    elif source is not None:
        _refuse_tables(source)
        script = read_text(source)
        try:
            converted = convert(script, project, None, None, source.parent, source.name)
        except ValueError as error:
            raise ValueError(f"{source}: {_as_settings(str(error))}") from None
        done = completed(converted, script, source, folder, DATA, f"{REWARD}:reward")
        texts[CONFIG], own = done.text, done.rewards
        notes += done.notes
        warnings = [*(_as_settings(one) for one in converted.assumed if not is_given(one)), *done.warnings]
        if done.own_rows:
            texts[DATA] = _sums(done.own_rows)
        elif converted.project == "verl":  # its data files have one form, whatever they hold
            row = _Row("prompt", _VERL_ANSWER)
    else:
        texts[DATA] = _sums()
    if converted is None:
        train = DATA if source is None else os.path.relpath(source, folder)
        values = row.names() | {"about": about, "name": _name(folder), "train": train, "rows": _rows(train)}
        texts[CONFIG] = _filled("config_cuda.yaml" if cuda else "config_cpu.yaml", values)
    texts[REWARD] = own.text if own is not None else _filled(f"{REWARD}.txt", row.names())
    texts[TEST] = own.test if own is not None else _filled(f"{TEST}.txt", row.names())
    if there := [name for name in texts if (folder / name).exists()]:
        are = "is" if len(there) == 1 else "are"
        raise ValueError(f"{folder}: {', '.join(there)} {are} there already; name another folder")
    if files := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        raise ValueError(f"{folder}: {files[0]} is a file; name a folder for the project, or the file with --from")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    return Project(tuple(folder / name for name in texts), converted, tuple(notes), tuple(warnings))


def _as_settings(text: str) -> str:
    """Return a text of the converter that names no option which this command has not."""
    for option, instead in _OPTIONS.items():
        text = text.replace(option, instead)
    return text


@dataclass(frozen=True)
class _Row:
    """The fields of a row that are its prompt and its answer, which may lie in a field of a field."""

    prompt: str
    answer: tuple[str, ...]

    def names(self) -> dict[str, str]:
        """Return what the templates call them."""
        value: object = "42"
        for name in reversed(self.answer[1:]):
            value = {name: value}
        return {
            "prompt": self.prompt,
            "answer": ".".join(self.answer),
            "answer_of": "".join(f'["{name}"]' for name in self.answer),
            "answer_field": self.answer[0],
            "answer_value": json.dumps(value),
        }


def _rows(train: str) -> str:
    if formats.kind(train) is None:
        return "the folder of a dataset, of which the split train is taken"
    if formats.kind(train) == formats.JSONL:
        return "one JSON object a line"
    return f"{str(formats.kind(train))[1:].replace('csv', 'CSV')}, a row for each prompt"


def _refuse_tables(source: Path) -> None:
    """Raise ValueError, with the command that helps, for data in a form that is not read here."""
    if source.suffix in _TABLES:
        to = source.with_suffix(formats.PARQUET).name
        reader = _TABLES[source.suffix].format(source.name)
        raise ValueError(
            f"{source}: data must be a file {formats.endings()}, or the folder of a dataset; this writes such a file:\n"
            f"python -c \"import pandas; pandas.{reader}.to_parquet('{to}')\""
        )


def _filled(name: str, values: dict[str, str]) -> str:
    """Return a file of the template with its names replaced."""
    return Template((FILES / name).read_text("utf-8")).substitute(values)


def _name(folder: Path) -> str:
    """Return the name of the run: that of the folder, as far as a run may be called so."""
    return run_name(folder.absolute().name) or "run"


def _fields(source: Path) -> tuple[_Row, list[str]]:
    """Return which fields of a data file are prompt and answer, and what is to be looked at."""
    found = counting.fields(source)
    if found is None:
        if source.is_file() and not source.stat().st_size:
            raise ValueError(f"{source}: it is empty: it needs at least one row with a prompt")
        kind = formats.kind(source)
        what = {
            formats.JSONL: "every line must be a JSON object",
            None: "it is no folder that save_to_disk wrote, or whose files are named by split, such as train.jsonl",
        }.get(kind, f"is it a {str(kind)[1:]} file?")
        raise ValueError(f"{source}: its first rows cannot be read: {what}")
    prompt = next((name for name in counting.PROMPT_FIELDS if name in found), None)
    answer = next((name for name in counting.ANSWER_FIELDS if name in found and name != prompt), None)
    if prompt is None:
        raise ValueError(f"{source}: no field is a prompt; it has {', '.join(found)}: call one of them prompt")
    notes = [f"data.prompt_key is {prompt}; the fields of a row are {', '.join(found)}"]
    if _VERL_ANSWER[0] in found and "data_source" in found:  # the form of verl's data
        row = _Row(prompt, _VERL_ANSWER)
    else:
        row = _Row(prompt, (answer or "answer",))
    if row.answer[0] not in found:
        notes.append(f"no field is an answer: {REWARD} reads fields['answer'], which you have to change")
    else:
        notes.append(f"{REWARD} compares the last number of a completion with the field {'.'.join(row.answer)}")
    return row, notes


def _sums(least: int = 0) -> str:
    """Return rows of data: sums of two numbers up to 20, always the same; at least so many as a rollout takes."""
    draw = random.Random(0)
    rows = []
    for _ in range(max(_ROWS, least)):
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        rows.append({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b})
    return "".join(f"{json.dumps(row)}\n" for row in rows)
