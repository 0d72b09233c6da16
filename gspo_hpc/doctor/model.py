"""Checks of the model's folder: complete, of a supported family, with its tokenizer. No weight is read."""

from __future__ import annotations

import os
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.doctor.finding import Section, gib
from gspo_hpc.models import architecture, hub, model_folder


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
    wrong = model_folder.problems(config)
    for problem in wrong:
        section.fail(problem.check, problem.text, problem.fix)
    for name, describe in (("model", _sizes), ("weights", _weights), ("tokenizer", _tokenizer)):
        if all(problem.check != name for problem in wrong):
            section.ok(name, describe(folder))


def _sizes(folder: Path) -> str:
    arch = architecture.outline(folder)
    return f"{arch.family}, {arch.num_layers} layers of {arch.hidden_size}, {folder}"


def _weights(folder: Path) -> str:
    files, total, _ = model_folder.read_shards(folder)
    count = "1 file" if files == 1 else f"{files} files"
    return f"{count}, {gib(total)}, complete according to the headers"


def _tokenizer(folder: Path) -> str:
    name = model_folder.tokenizer_files(folder)[0]
    return f"{name}{', with a chat template' if model_folder.has_chat_template(folder) else ''}"
