"""Data by a name: of files on the Hugging Face hub, or of tasks that a package makes (:mod:`gspo_hpc.data.gym_tasks`).

On the hub that is OWNER/NAME[@REVISION], and behind it :FILE, which may be a pattern, :CONFIG/SPLIT or :SPLIT. Without
any of these it is the split train of the only or default config. Files are taken from the local cache, or downloaded
into it; the config of a run has their paths, so that its nodes need no hub.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data.counting import files
from gspo_hpc.data.files import folders
from gspo_hpc.data.files.formats import DATA_FILES, endings
from gspo_hpc.data.sources import parts
from gspo_hpc.models import hub_cache

_NAME = re.compile(rf"(?P<repo>{hub_cache.REPO})(?:@(?P<revision>[\w./-]+))?(?::(?P<inside>[^:]+))?")
_PART = re.compile(r"-of-0*(\d+)\.[\w.]+$")  # of a file that is one of so many, as datasets writes them
_SPLIT = re.compile(folders.SPLIT)
TASKS = "reasoning_gym:"  # what the names of tasks begin with; their module is imported for them alone


def is_task(path: str) -> bool:
    """Return whether `path` names tasks of reasoning-gym."""
    return path.startswith(TASKS)


def is_name(path: str) -> bool:
    """Return whether `path` names files of a dataset on the hub, or tasks."""
    if is_task(path):
        return True
    match = _NAME.fullmatch(path)
    if match is None or Path(path).exists() or folders.named(path) is not None:
        return False
    owner, name = match["repo"].split("/")
    plain = match["inside"] is None and match["revision"] is None  # may be a file that is not there
    return not (plain and (owner in hub_cache.FOLDERS or Path(name).suffix[1:].isalpha()))


def wrong_name(name: str) -> str | None:
    """Return what is wrong with the files that a name asks for, whether the cache has them or not; None if nothing."""
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        try:
            gym_tasks.parsed(name)
        except ValueError as mistake:
            return str(mistake)
        return None
    inside = _split(name)[2]
    if inside is None or inside.endswith(DATA_FILES) or _SPLIT.fullmatch(inside):
        return None
    return f"{name}: what follows the colon must be CONFIG/SPLIT, or end in {endings()}"


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
    if _is_split(inside):
        fetch = f"hf download {repo} --repo-type dataset{at} --local-dir {here}"
        return f"{fetch}; then give {here if inside is None else f'{here}:{inside}'}"
    # A name may be another's, and what is printed is pasted into a shell.
    fetch = f"hf download {repo} --repo-type dataset{at} --include {shlex.quote(str(inside))} --local-dir {here}"
    return f"{fetch}; then give {here}/{inside}"


def _with_paths(config: Config, path: Callable[[str, str], str]) -> Config:
    named = [one for one in parts.every(config.data) if is_name(one.path)]
    return parts.with_paths(config, {one.key: path(one.key, one.path) for one in named})


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
        if inside is None or _is_split(inside):
            _download_split(repo, revision, inside)
        else:
            hub_cache.download("dataset", repo, revision, [inside])
    except ValueError as mistake:
        raise ValueError(f"{key}: {name}: {mistake}") from None
    except hub_cache.NotFetched as reason:
        raise ValueError(
            f"{key}: {name}: it is not in the cache of the hub, and cannot be taken from the hub ({reason})\n"
            f"where the hub can be reached: {command(name)}"
        ) from None
    if (found := _cached(name)) is None:
        what = "file, or not all of its parts"
        if _is_split(inside):
            what = (
                f"split in files that are read here; those that the hub makes: {repo}@refs/convert/parquet:CONFIG/SPLIT"
            )
        raise ValueError(f"{key}: {name}: the dataset has no such {what}")
    return found


def _download_split(repo: str, revision: str, inside: str | None) -> None:
    """Download the files of a split, which README.md names, or their own names. Raises ValueError for a wrong name."""
    config, split = _config_and_split(inside)
    place = hub_cache.download("dataset", repo, revision, [folders.README])
    wanted = folders.declared(place, config, split)
    hub_cache.download("dataset", repo, revision, wanted or folders.patterns(config, split))


def _config_and_split(inside: str | None) -> tuple[str | None, str | None]:
    match = _SPLIT.fullmatch(inside or "")
    return (None, None) if match is None else (match["config"], match["split"])


def _is_split(inside: str | None) -> bool:
    """Return whether what follows the colon is a split, and no file."""
    return inside is None or not inside.endswith(DATA_FILES)


def _cached(name: str) -> str | None:
    """Return the path of files in the cache; None if none is there, or if one says that there are more."""
    if is_task(name):
        from gspo_hpc.data import gym_tasks

        tasks = gym_tasks.kept(name)
        return None if tasks is None else str(tasks)
    repo, revision, inside = _split(name)
    folder = hub_cache.snapshot("dataset", repo, revision)
    if _is_split(inside):
        path = str(folder) if inside is None else f"{folder}:{inside}"
        single = False
    else:
        path = str(folder / str(inside))
        single = not any(mark in str(inside) for mark in "*?")
    found = [file for file in files(path) if file.is_file()]
    numbers = [int(match[1]) for file in found if (match := _PART.search(file.name))]
    return path if found and (single or not numbers or len(found) >= max(numbers)) else None


def _split(name: str) -> tuple[str, str, str | None]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"] or hub_cache.MAIN, match["inside"]
