"""Data by a name: of files on the Hugging Face hub, or of tasks that a package makes (:mod:`gspo_hpc.data.gym_tasks`).

On the hub that is OWNER/NAME:FILE or OWNER/NAME@REVISION:FILE, where FILE may be a pattern. The colon tells a dataset
from a file of this machine. Files are taken from the local cache, or downloaded into it; the config of a run has their
paths, so that its nodes need no hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gspo_hpc.config.schema import Config, replace
from gspo_hpc.data.counting import DATA_FILES, files
from gspo_hpc.models import hub_cache

_NAME = re.compile(rf"(?P<repo>{hub_cache.REPO})(?:@(?P<revision>[\w./-]+))?:(?P<inside>[^:]+)")
_PART = re.compile(r"-of-0*(\d+)\.\w+$")  # of a file that is one of so many, as datasets writes them
KEYS = ("train", "eval")
TASKS = "reasoning_gym:"  # what the names of tasks begin with; their module is imported for them alone


def is_task(path: str) -> bool:
    """Return whether `path` names tasks of reasoning-gym."""
    return path.startswith(TASKS)


def is_name(path: str) -> bool:
    """Return whether `path` names files of a dataset on the hub, or tasks."""
    return is_task(path) or _NAME.fullmatch(path) is not None and not Path(path).exists()


def wrong_name(name: str) -> str | None:
    """Return what is wrong with the files that a name asks for, whether the cache has them or not; None if nothing."""
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        try:
            gym_tasks.parsed(name)
        except ValueError as mistake:
            return str(mistake)
        return None
    if _split(name)[2].endswith(DATA_FILES):
        return None
    return f"{name}: what follows the colon must end in {' or '.join(DATA_FILES)}"


def with_files(config: Config) -> Config:
    """Return the config with the paths of its data, which is downloaded if it is named by its place on the hub.

    Raises ValueError, with the command that fetches it elsewhere, if neither the cache nor the hub has it.
    """
    return _with_paths(config, _path)


def with_cached_files(config: Config) -> Config:
    """Return the config with the paths of data that is in the cache; nothing is downloaded."""
    return _with_paths(config, lambda key, name: _cached(name) or name)


def command(name: str) -> str:
    """Return the command that downloads the files into a folder, and what to write into the config then.

    For tasks it is the one that installs their package.
    """
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        return gym_tasks.INSTALL
    repo, revision, inside = _split(name)
    at = "" if revision == hub_cache.MAIN else f" --revision {revision}"
    here = f"data/{repo.split('/')[1]}"
    fetch = f"hf download {repo} --repo-type dataset{at} --include '{inside}' --local-dir {here}"
    return f"{fetch}; then give {here}/{inside}"


def _with_paths(config: Config, path: Callable[[str, str], str]) -> Config:
    given = {key: getattr(config.data, key) for key in KEYS}
    named = {key: path(f"data.{key}", name) for key, name in given.items() if name is not None and is_name(name)}
    return replace(config, data=replace(config.data, **named)) if named else config


def _path(key: str, name: str) -> str:
    if (found := _cached(name)) is not None:
        return found
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        try:
            return str(gym_tasks.made(name))
        except ValueError as mistake:
            raise ValueError(f"{key}: {mistake}") from None
    repo, revision, inside = _split(name)
    if (wrong := wrong_name(name)) is not None:
        raise ValueError(f"{key}: {wrong}")
    try:
        hub_cache.download("dataset", repo, revision, [inside])
    except hub_cache.NotFetched as reason:
        raise ValueError(
            f"{key}: {name}: it is not in the cache of the hub, and cannot be taken from the hub ({reason})\n"
            f"where the hub can be reached: {command(name)}"
        ) from None
    if (found := _cached(name)) is None:
        raise ValueError(f"{key}: {name}: the dataset has no such file, or not all of its parts")
    return found


def _cached(name: str) -> str | None:
    """Return the path of files in the cache; None if none is there, or if one says that there are more."""
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        tasks = gym_tasks.kept(name)
        return None if tasks is None else str(tasks)
    repo, revision, inside = _split(name)
    path = hub_cache.snapshot("dataset", repo, revision) / inside
    found = [file for file in files(path) if file.is_file()]
    parts = [int(match[1]) for file in found if (match := _PART.search(file.name))]
    single = not any(mark in inside for mark in "*?")
    return str(path) if found and (single or not parts or len(found) >= max(parts)) else None


def _split(name: str) -> tuple[str, str, str]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"] or hub_cache.MAIN, match["inside"]
