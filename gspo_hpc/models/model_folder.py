"""Checks of a model's folder: config, weights and tokenizer are there and whole. Headers are read, and no weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.weight_files import INDEX, SINGLE, paths, read_header
from gspo_hpc.system.text import first_line

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


class Problem(NamedTuple):
    """A thing that is wrong with a folder, and what to do."""

    check: str  # "model", "weights" or "tokenizer"
    text: str
    fix: str


def problems(config: Config) -> list[Problem]:
    """Return what keeps the folder `model.path` from being trained; an empty list if nothing is wrong."""
    assert config.model.path is not None
    folder = Path(config.model.path)
    found = (sizes(folder, config), weights(folder), tokenizer(folder, config))
    return [one for one in found if one is not None]


def sizes(folder: Path, config: Config) -> Problem | None:
    """Return what is wrong with config.json."""
    if not (folder / "config.json").is_file():
        fix = "give the folder that has config.json, the weights and the tokenizer's files"
        return Problem("model", f"{folder} has no config.json: it is no Hugging Face model folder", fix)
    try:
        architecture.read(folder) if config.model.provider == "own" else architecture.outline(folder)
    except (ValueError, OSError, TypeError) as error:
        families = ", ".join(architecture.SUPPORTED)
        fix = f"use one of {families}; model.provider=mcore_bridge supports others, on GPUs"
        return Problem("model", first_line(str(error)), fix)
    return None


def weights(folder: Path) -> Problem | None:
    """Return what is wrong with the files of weights."""
    _, _, wrong = read_shards(folder)
    if not wrong:
        return None
    more = f"; there are {len(wrong) - 1} more errors" if len(wrong) > 1 else ""
    fix = "download or copy these files again, and compare their sizes with the source"
    return Problem("weights", f"{folder}: {wrong[0]}{more}", fix)


def tokenizer(folder: Path, config: Config) -> Problem | None:
    """Return what is wrong with the tokenizer's files, or with its chat template."""
    fix = "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) from the model's source"
    if not tokenizer_files(folder):
        return Problem("tokenizer", f"{folder} has none of {', '.join(_TOKENIZERS)}", fix)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            _json(folder / name)
        except (ValueError, OSError, RecursionError) as error:
            return Problem("tokenizer", f"{folder / name} is not JSON: {error}", fix)
    if config.data.chat_template and not has_chat_template(folder):
        text = f"the tokenizer in {folder} has no chat template, but data.chat_template is true"
        return Problem("tokenizer", text, "data.chat_template=false for text prompts, or use a model that has one")
    return None


def lacking(folder: Path) -> list[str]:
    """Return which of "weights" and "tokenizer" a folder has no file of."""
    try:
        there = any(path.is_file() for path in paths(folder))
    except ValueError:  # an index that cannot be read is a file of them
        there = (folder / INDEX).exists()
    return ["weights"] * (not there) + ["tokenizer"] * (not tokenizer_files(folder))


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the tokenizer."""
    return [name for name in _TOKENIZERS if (folder / name).is_file()]


def has_chat_template(folder: Path) -> bool:
    """Return True if the tokenizer has a chat template. Raises ValueError if its settings are not JSON."""
    settings = _json(folder / "tokenizer_config.json")
    own = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    return own or bool(isinstance(settings, dict) and settings.get("chat_template"))


def read_shards(folder: Path) -> tuple[int, int, list[str]]:
    """Return the number of weight files in a folder, their bytes, and what is wrong with them."""
    index = folder / INDEX
    wrong: list[str] = []
    if index.exists():
        try:
            names: dict[str, str] = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            return 0, 0, [f"{INDEX} is not readable: {type(error).__name__}: {error}"]
    elif (folder / SINGLE).exists():
        names = {}
    else:
        return 0, 0, [f"there is no {SINGLE} and no {INDEX}"]
    files = sorted(set(names.values())) or [SINGLE]
    total = 0
    for file in files:
        try:
            if Path(file).name != file:
                raise ValueError(f"{INDEX} names {file}, a file outside of the folder")
            tensors = read_header(folder / file)
        except FileNotFoundError:
            wrong.append(f"{file} is missing")
            continue
        except (ValueError, OSError) as error:
            wrong.append(first_line(str(error)))
            continue
        total += (folder / file).stat().st_size
        if lost := sorted(name for name, at in names.items() if at == file and name not in tensors):
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            wrong.append(f"{file} lacks {lost[0]}{more}, although {INDEX} lists it")
    return len(files), total, wrong


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None
