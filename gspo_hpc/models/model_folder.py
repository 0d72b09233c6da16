"""Checks of a model's folder: config, weights and tokenizer are there, whole and of one model.

Headers are read, and no weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config.schema import Config, RewardModel, replace
from gspo_hpc.models import architecture, weight_table
from gspo_hpc.models.weight_files import INDEX, SINGLE, paths, read_header
from gspo_hpc.system.text import MALFORMED, first_line, parse_json

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


class Problem(NamedTuple):
    """A thing that is wrong with a folder, and what to do."""

    check: str  # "model", "weights" or "tokenizer"
    text: str
    fix: str
    absent: bool = False  # the folder has no weights: a model that is planned here, and is whole where it is trained


def problems(config: Config, scores: RewardModel | None = None) -> list[Problem]:
    """Return what keeps the folder `model.path` from being trained; an empty list if nothing is wrong.

    `scores`: it is the folder of this reward model, which is not trained.
    """
    if scores is not None:
        return _scoring_problems(config, scores)
    assert config.model.path is not None
    folder = Path(config.model.path)
    try:
        elsewhere = not has_weights(folder)
        found = [sizes(folder, config), weights(folder), tokenizer(folder, config)]
        if found[:2] == [None, None]:
            found.insert(2, shapes(folder, config))
    except OSError as error:
        return [Problem("model", f"{folder} cannot be read: {error.strerror}", "give a folder that you may read")]
    if found[0] is not None and not found[0].absent:
        elsewhere = False  # a folder of something else
    return [one._replace(absent=one.absent and elsewhere) for one in found if one is not None]


def _scoring_problems(config: Config, model: RewardModel) -> list[Problem]:
    """Return what keeps the folder `model.path` of a config from being used as that of a reward model by an engine.

    Which families and tensors it has is the engine's business; the plan looks at what its config.json says it is.
    """
    assert config.model.path is not None
    folder = Path(config.model.path)
    own, needs = model.chat_template_kwargs.get("chat_template"), model.kind == "generative"
    data = replace(config.data, chat_template=needs and not own)
    found: list[Problem | None] = []
    try:
        if not (folder / "config.json").is_file():
            text = f"{folder} has no config.json: it is no Hugging Face model folder"
            found.append(Problem("model", text, "give the folder that has config.json, the weights and the tokenizer"))
        found += [weights(folder), tokenizer(folder, replace(config, data=data))]
    except OSError as error:
        return [Problem("model", f"{folder} cannot be read: {error.strerror}", "give a folder that you may read")]
    fix = "give a generative reward model that has one, or chat_template in its chat_template_kwargs"
    lacks = "no chat template, but data.chat_template is true"
    return [
        one._replace(text=one.text.replace(lacks, "no chat template"), fix=fix if lacks in one.text else one.fix)
        for one in found
        if one is not None
    ]


def sizes(folder: Path, config: Config) -> Problem | None:
    """Return what is wrong with config.json."""
    if not (folder / "config.json").is_file():
        fix = "give the folder that has config.json, the weights and the tokenizer's files"
        text = f"{folder} has no config.json: it is no Hugging Face model folder"
        return Problem("model", text, fix, absent=not any(folder.iterdir()))
    try:
        architecture.read(folder) if config.model.provider == "own" else architecture.outline(folder)
    except (OSError, *MALFORMED) as error:
        families = ", ".join(architecture.SUPPORTED)
        fix = f"use one of {families}; model.provider=mcore_bridge supports others, on GPUs"
        return Problem("model", first_line(str(error)), fix)
    return None


def weights(folder: Path) -> Problem | None:
    """Return what is wrong with the files of weights."""
    _, _, wrong = read_shards(folder)
    if not wrong:
        return None
    more = f", and {len(wrong) - 1} more error{'s' * (len(wrong) > 2)}" if len(wrong) > 1 else ""
    fix = "download or copy these files again, and compare their sizes with the source"
    return Problem("weights", f"{folder}: {wrong[0]}{more}", fix, absent=not has_weights(folder))


def shapes(folder: Path, config: Config) -> Problem | None:
    """Return how whole files of weights and a config.json that can be read disagree, if they do.

    Where mcore-bridge provides the model, nothing here knows its tensors.
    """
    if config.model.provider != "own":
        return None
    arch = architecture.read(folder)
    stored = {name: entry.shape for path in paths(folder) for name, entry in read_header(path).items()}
    fix = "config.json and weights must be of one model: download or copy both again"
    known: set[str] = set()
    for layer in range(arch.num_layers):
        for mapping in weight_table.stage_table(arch, layer, 1, layer == 0, layer == arch.num_layers - 1):
            for name, shape in zip(mapping.hf, mapping.shapes, strict=True):
                if name not in stored:
                    text = f"{folder}: tensor {name} is missing, which config.json asks for"
                    return Problem("weights", text, fix)
                if stored[name] != shape:
                    text = f"{folder}: tensor {name} has the shape {stored[name]}, but config.json says {shape}"
                    return Problem("weights", text, fix)
            known.update(mapping.hf)
    if unknown := sorted(name for name in stored.keys() - known if not weight_table.is_extra(name)):
        more = f" and {len(unknown) - 1} more have" if len(unknown) > 1 else " has"
        text = f"{folder}: tensor {unknown[0]}{more} no place in the model that config.json describes"
        return Problem("weights", text, fix)
    return None


def tokenizer(folder: Path, config: Config) -> Problem | None:
    """Return what is wrong with the tokenizer's files, or with its chat template."""
    fix = "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) from the model's source"
    if not tokenizer_files(folder):
        return Problem("tokenizer", f"{folder} has none of {', '.join(_TOKENIZERS)}", fix, absent=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            content = _json(folder / name)
        except (ValueError, OSError) as error:
            return Problem("tokenizer", f"{folder / name} is not JSON: {error}", fix)
        if (folder / name).is_file() and not isinstance(content, dict):
            return Problem("tokenizer", f"{folder / name} is not a JSON object", fix)
        if name == "tokenizer.json" and content is not None and "model" not in content:
            return Problem("tokenizer", f"{folder / name} is no tokenizer: it has no 'model'", fix)
    if config.data.chat_template and not has_chat_template(folder):
        text = f"the tokenizer in {folder} has no chat template, but data.chat_template is true"
        return Problem("tokenizer", text, "data.chat_template=false for text prompts, or use a model that has one")
    return None


def has_weights(folder: Path) -> bool:
    """Return whether a folder has any file of weights, of this format or another.

    An index without the files that it names is none of them: it comes along where only small files are copied.
    """
    if any(path.suffix in _WEIGHTS and path.is_file() for path in folder.iterdir()):
        return True
    try:
        named = paths(folder)
    except ValueError:
        return (folder / INDEX).exists()  # which cannot be read
    return not named or any(path.parent != folder for path in named)


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the tokenizer."""
    return [name for name in _TOKENIZERS if (folder / name).is_file()]


def chat_template(folder: Path) -> str:
    """Return the text of the tokenizer's chat template, of all if there are several; empty where there is none."""
    texts = [
        file.read_text("utf-8")
        for name in ("chat_template.jinja", "chat_template.json")
        if (file := folder / name).is_file()
    ]
    settings = _json(folder / "tokenizer_config.json")
    return "\n".join([*texts, str(settings.get("chat_template") or "") if isinstance(settings, dict) else ""])


def template_of(config: Config) -> str:
    """Return the chat template of a config; empty where it is not on this machine, or cannot be read."""
    if own := config.data.chat_template_kwargs.get("chat_template"):
        return str(own)
    folder = Path(config.model.path or "")
    try:
        return chat_template(folder) if config.model.path and folder.is_dir() else ""
    except (OSError, ValueError):  # the check of the tokenizer says so
        return ""


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
            names: dict[str, str] = dict(parse_json(index.read_text("utf-8"))["weight_map"])
            if any(not isinstance(name, str) for name in names.values()):
                raise TypeError("weight_map must give the name of a file for each tensor")
        except (OSError, *MALFORMED) as error:
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
    return parse_json(path.read_text("utf-8"), finite=False) if path.is_file() else None
