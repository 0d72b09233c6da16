"""Models by their names on the Hugging Face hub: taken from the local cache, or downloaded into it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from gspo_hpc.config.algorithm import AlgorithmSettings
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.models import hub_cache
from gspo_hpc.models.hub_cache import MAIN

_NAME = re.compile(rf"(?P<repo>{hub_cache.REPO})(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configs, tokenizers, chat templates


def is_name(path: str) -> bool:
    """Return whether `path` may be OWNER/NAME or OWNER/NAME@REVISION on the hub.

    It is not where OWNER is a folder here, or what people call the folder of their models.
    """
    owner = path.partition("/")[0]
    return _NAME.fullmatch(path) is not None and owner not in hub_cache.FOLDERS and not os.path.exists(owner)


def absence(path: str) -> tuple[str, str]:
    """Return how to say that there is no model at `path`, and what a run does then."""
    if is_name(path):
        return "is not in the cache of the hub", "downloads the model"
    return "does not exist", "needs the folder itself"


def cached(name: str) -> Path | None:
    """Return the folder of a model in the cache, at the revision that was downloaded last; None if there is none.

    The folder has a config.json; other files may be missing.
    """
    folder = hub_cache.snapshot("model", *_split(name))
    return folder if (folder / "config.json").is_file() else None


def folder(name: str, key: str = "model.path") -> Path:
    """Return the folder of a whole model, from the cache or else from the hub. Progress goes to standard error.

    Raises ValueError, with the command that fetches the model elsewhere, if neither has it. `key` is the setting that
    names it.
    """
    found = cached(name)
    if found is not None and _whole(found):
        return found
    try:
        found = hub_cache.download("model", *_split(name), _FILES)
    except hub_cache.NotFetched as reason:
        raise ValueError(_refusal(name, key, str(reason))) from None
    if not _whole(found):
        raise ValueError(f"{key} {name}: the hub has no config.json, or no weights in safetensors, of this model")
    return found


def with_folder(config: Config, *, teacher: bool = True) -> Config:
    """Return the config with the folders of its models, which are downloaded if they are hub names.

    Raises ValueError if there is no such folder, and the hub cannot give it. Without `teacher` the config has none, for
    commands that do not train.
    """
    config = _with_reward_models(_with_model(config, _found), _found)
    return _with_teacher(config, _found) if teacher else replace(config, algorithm=_taught_by(config, None))


def _with_model(config: Config, find: Callable[[str, str], str]) -> Config:
    path = config.model.path
    if path is None or (found := find(path, "model.path")) == path:
        return config
    return replace(config, model=replace(config.model, path=found))


def _with_reward_models(config: Config, find: Callable[[str, str], str]) -> Config:
    models = config.reward.models
    found = [find(one.path, f"reward.models[{number}].path") for number, one in enumerate(models)]
    if found == [one.path for one in models]:
        return config
    placed = tuple(replace(one, path=path) for one, path in zip(models, found, strict=True))
    return replace(config, reward=replace(config.reward, models=placed))


def _with_teacher(config: Config, find: Callable[[str, str], str]) -> Config:
    teacher = config.algorithm.teacher
    if teacher is None or (found := find(teacher, "algorithm.teacher")) == teacher:
        return config
    return replace(config, algorithm=_taught_by(config, found))


def _taught_by(config: Config, teacher: str | None) -> AlgorithmSettings:
    return replace(config.algorithm, teacher=teacher)


def _found(path: str, key: str) -> str:
    """Return the folder of a model at a path, or of that name on the hub; raise ValueError if there is none."""
    if os.path.isdir(path):
        return path
    if (wrong := not_a_folder(path)) is not None:
        raise ValueError(f"{key}: {wrong}")
    if not is_name(path):
        raise ValueError(
            f"{key} {path} does not exist: give a Hugging Face model folder, or the model's name on the hub"
        )
    return str(folder(path, key))


def not_a_folder(path: str) -> str | None:
    """Return what is wrong with a path where there is something else than a folder; None if nothing is."""
    return f"{path} is a file: give the folder of a model" if os.path.exists(path) and not os.path.isdir(path) else None


def with_cached_folder(config: Config) -> Config:
    """Return the config with the cached folders of its models, of each that is there as a whole."""
    return _with_teacher(_with_reward_models(_with_model(config, _cached), _cached), _cached)


def _cached(path: str, key: str) -> str:
    """Return the folder of a model in the cache, if all of it is there; else the path itself."""
    if not is_name(path) or (found := cached(path)) is None or not _whole(found):
        return path
    return str(found)


def _split(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"] or MAIN


def _whole(folder: Path) -> bool:
    """Return whether all files of weights are there, which a download that was ended leaves out."""
    from gspo_hpc.models import weight_files  # only here: a plan needs no weights

    try:
        return (folder / "config.json").is_file() and all(path.is_file() for path in weight_files.paths(folder))
    except ValueError:
        return False


def command(name: str, key: str = "model.path") -> str:
    """Return the command that downloads a model into a folder, and what to write into the config then."""
    repo, revision = _split(name)
    at = "" if revision == MAIN else f" --revision {revision}"
    here = f"models/{repo.split('/')[1]}"
    return f"hf download {repo}{at} --local-dir {here}; then give {key}={here}"


def _refusal(name: str, key: str, reason: str) -> str:
    return (
        f"{key} {name}: there is no such folder, and it cannot be taken from the hub ({reason})\n"
        f"where the hub can be reached: {command(name, key)}"
    )
