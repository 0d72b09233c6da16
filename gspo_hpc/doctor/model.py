"""Checks of the model's folder: complete, of a supported family, with its tokenizer. No weight is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.doctor.finding import Section, gib
from gspo_hpc.models import architecture, hub
from gspo_hpc.models.weight_files import INDEX, SINGLE, read_header
from gspo_hpc.system.text import first_line

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def check(config: Config, section: Section) -> None:
    """Add the findings about the model."""
    if config.model.path is None:
        section.skip("model", "model.path is not set")
        return
    folder = Path(config.model.path)
    if hub.is_name(config.model.path):
        found = f"{config.model.path} is not in the cache of the hub; train and submit download it"
        fix = f"if this machine cannot reach the hub, on one that can: {hub.command(config.model.path)}"
        section.warn("model", found, fix)
        return
    if not folder.is_dir():
        is_file = " (it is a file)" if folder.exists() else ""
        fix = f"give a folder in Hugging Face format; relative paths start at {os.getcwd()}"
        section.fail("model", f"model.path {folder}: no such folder{is_file}", fix)
        return
    try:
        own = config.model.provider == "own"
        arch = architecture.read(folder) if own else architecture.outline(folder)
        section.ok("model", f"{arch.family}, {arch.num_layers} layers of {arch.hidden_size}, {folder}")
    except (ValueError, OSError, TypeError) as error:
        families = ", ".join(architecture.SUPPORTED)
        fix = f"use one of {families}; model.provider=mcore_bridge supports others, on GPUs"
        section.fail("model", first_line(str(error)), fix)
    _weights(section, folder)
    _tokenizer(section, folder, config)


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


def _weights(section: Section, folder: Path) -> None:
    files, total, wrong = read_shards(folder)
    if wrong:
        more = f"; there are {len(wrong) - 1} more errors" if len(wrong) > 1 else ""
        fix = "download or copy these files again, and compare their sizes with the source"
        section.fail("weights", f"{folder}: {wrong[0]}{more}", fix)
    else:
        count = "1 file" if files == 1 else f"{files} files"
        section.ok("weights", f"{count}, {gib(total)}, complete according to the headers")


def _tokenizer(section: Section, folder: Path, config: Config) -> None:
    there = [name for name in _TOKENIZERS if (folder / name).is_file()]
    fix = "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) from the model's source"
    if not there:
        section.fail("tokenizer", f"{folder} has none of {', '.join(_TOKENIZERS)}", fix)
        return
    settings: dict[str, Any] = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            settings = json.loads((folder / name).read_text("utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            section.fail("tokenizer", f"{folder / name} is not JSON: {error}", fix)
            return
    template = bool(isinstance(settings, dict) and settings.get("chat_template"))
    template = template or any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    if config.data.chat_template and not template:
        text = "the tokenizer has no chat template, but data.chat_template is true"
        section.fail("tokenizer", text, "data.chat_template=false for text prompts, or use a model that has one")
    else:
        section.ok("tokenizer", f"{there[0]}{', with a chat template' if template else ''}")
