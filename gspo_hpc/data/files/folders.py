"""Folders of data, as FOLDER[:[CONFIG/]SPLIT]: those that the library datasets saves, and repositories of the hub.

A folder may be of another's making: no file is read that is outside of it, be it by its name or by a link. In the cache
of the hub, the files of a snapshot are links to the blobs of its repository.

A saved folder (`save_to_disk`) has Arrow files, and names them in JSON. A repository names the files of each config and
split at the top of its README.md, or the names of its files say so. No numpy, for commands that answer at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config import yaml_text
from gspo_hpc.data.files.formats import DATA_FILES, kind
from gspo_hpc.models import hub_cache
from gspo_hpc.system.text import near_miss, parse_json, shortened

README = "README.md"
TRAIN = "train"  # the split that is taken where none is named
SPLIT = r"(?:(?P<config>[\w.+-]+)/)?(?P<split>[\w.+-]+)"  # what follows the colon, if it is no file
_SPLIT = re.compile(SPLIT)
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # of save_to_disk
_LISTED = {_SAVED: "files", _SAVED_SPLITS: "splits"}
# Words by which names of files and folders tell their split, as the library datasets reads them.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


class Part(NamedTuple):
    """A split of a folder, as a path of data names it."""

    folder: Path
    config: str | None
    split: str | None


def named(path: str | Path) -> Part | None:
    """Return the folder and split that a path of data names; None if it names files."""
    text = str(path)
    if Path(text).is_dir():
        return Part(Path(text), None, None)
    folder, colon, inside = text.rpartition(":")
    match = _SPLIT.fullmatch(inside)
    if not colon or match is None or inside.endswith(DATA_FILES) or not Path(folder).is_dir():
        return None
    return Part(Path(folder), match["config"], match["split"])


def files(part: Part) -> list[Path]:
    """Return the files of a split. Raises ValueError, with the names that there are, for one that is not there."""
    folder, config, split = part
    if (saved := folder / _SAVED_SPLITS).is_file():
        if config is not None:
            raise ValueError(f"{folder} was written by save_to_disk, which has no configs: give {folder}:SPLIT")
        names = [_inside(folder, name) for name in _names(saved, _json(folder, saved).get("splits"))]
        return _saved(folder, folder / _chosen(folder, "split", split or _default(names), names))
    if (folder / _SAVED).is_file():
        if split not in (None, TRAIN) or config is not None:
            raise ValueError(f"{folder} was written by save_to_disk, and has one split: give {folder}")
        return _saved(folder, folder)
    patterns = declared(folder, config, split)
    if patterns is None:
        return _by_name(folder, config, split or TRAIN)
    found = sorted({file for pattern in patterns for file in _matching(folder, pattern)})
    if not found:
        raise ValueError(f"{folder}: no file here is one of {', '.join(patterns)}, which {README} names")
    return _of_one_kind(folder, found)


def declared(folder: Path, config: str | None, split: str | None) -> list[str] | None:
    """Return the patterns of a split's files that README.md declares; None if it declares none of any.

    Raises ValueError, with the names that there are, for a config or split that it does not have.
    """
    configs = _configs(folder)
    if not configs:
        return None
    if config is None and len(configs) > 1 and "default" not in configs:
        raise ValueError(f"{folder} has several configs: give {folder}:CONFIG/SPLIT with one of {', '.join(configs)}")
    chosen = _chosen(
        folder, "config", config or ("default" if "default" in configs else next(iter(configs))), [*configs]
    )
    splits = configs[chosen]
    return splits[_chosen(folder, "split", split or _default([*splits]), [*splits])]


def patterns(config: str | None, split: str | None) -> list[str]:
    """Return patterns of files that may be those of a split in a repository whose README.md declares none."""
    words = _WORDS.get(split or TRAIN, (split,))
    inside = "" if config is None else f"{config}/"
    return [f"{inside}*{word}*{end}" for word in words for end in DATA_FILES]


def _configs(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the patterns of files by config and split, from the YAML at the top of README.md."""
    readme = folder / README
    if not readme.is_file():
        return {}
    _refuse_outside(folder, readme)
    head = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", readme.read_text("utf-8", errors="replace"), re.DOTALL)
    try:
        told = yaml_text.read(head[1]) if head is not None else None
    except ValueError as error:
        raise ValueError(f"{readme}: {error}") from None
    found: dict[str, dict[str, list[str]]] = {}
    configs = told.get("configs") if isinstance(told, Mapping) else None
    for one in configs if isinstance(configs, list) else ():
        if isinstance(one, Mapping) and "data_files" in one:
            inside = str(one.get("data_dir") or "")
            found[str(one.get("config_name", "default"))] = _splits(one["data_files"], inside)
    return found


def _splits(told: Any, inside: str) -> dict[str, list[str]]:
    """Return the patterns of each split: told as one, as a list of them, or as a list of splits with their own."""
    many = told if isinstance(told, list) else [told]
    found: dict[str, list[str]] = {}
    for one in many:
        split, paths = (one.get("split", TRAIN), one.get("path", [])) if isinstance(one, Mapping) else (TRAIN, one)
        names = paths if isinstance(paths, list) else [paths]
        found.setdefault(str(split), []).extend(f"{inside}/{name}" if inside else str(name) for name in names)
    return found


def _by_name(folder: Path, config: str | None, split: str) -> list[Path]:
    """Return the files whose names, or folders' names, have the word of a split."""
    place = folder if config is None else folder / config
    _refuse_outside(folder, place)
    if not place.is_dir():
        inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        raise ValueError(f"{folder} has no config {config!r}{near_miss(str(config), inside, known=True)}")
    every = [path for path in sorted(place.rglob("*")) if path.is_file() and kind(path) is not None]
    every = [path for path in every if not any(part.startswith(".") for part in path.relative_to(place).parts)]
    if not every:
        raise ValueError(f"{place} has no data files ({', '.join(DATA_FILES)}), and no {README} that names any")
    found = [path for path in every if _tells(path.relative_to(place), _WORDS.get(split, (split,)))]
    if (
        not found
        and split == TRAIN
        and not any(_tells(path.relative_to(place), words) for path in every for words in _WORDS.values())
    ):
        found = every  # as datasets takes files whose names say nothing
    if not found:
        some = ", ".join(path.relative_to(place).as_posix() for path in every[:5])
        raise ValueError(f"{place}: no file's name says that it is of the split {split!r}; there are: {some}")
    _refuse_outside(folder, *found)
    return _of_one_kind(place, found)


def _tells(path: Path, words: tuple[str, ...]) -> bool:
    return re.search(rf"(?:^|[^a-z])(?:{'|'.join(map(re.escape, words))})(?:[^a-z]|$)", path.as_posix()) is not None


def _of_one_kind(folder: Path, found: list[Path]) -> list[Path]:
    if wrong := [path for path in found if kind(path) is None]:
        raise ValueError(f"{wrong[0]}: the name of a data file must end in {', '.join(DATA_FILES)}")
    if len(kinds := sorted({str(kind(path)) for path in found})) > 1:
        raise ValueError(f"{folder} has the same split as {' and as '.join(kinds)}: name the files by a pattern")
    return found


def _saved(named: Path, folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that save_to_disk wrote, in their order; it is in `named`, or the same."""
    path = folder / _SAVED
    state = _json(named, path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{folder} has its rows in another order than its files: save_to_disk it again")
    told = state.get("_data_files")
    names = (
        [one.get("filename") if isinstance(one, Mapping) else None for one in told] if isinstance(told, list) else None
    )
    found = [folder / _inside(folder, name) for name in _names(path, names)]
    _refuse_outside(named, *found)
    return found


def _names(path: Path, told: Any) -> list[str]:
    """Return names that a file of save_to_disk lists. Raises ValueError for anything else."""
    if not isinstance(told, list) or not all(isinstance(one, str) for one in told):
        raise ValueError(f"{path} is not what save_to_disk writes: it does not list its {_LISTED[path.name]} by name")
    return told


def _inside(folder: Path, name: str) -> str:
    """Return a name that is one of the folder itself. Raises ValueError for another."""
    if Path(name).name != name or name == "..":
        raise ValueError(f"{folder} names a file outside of it: {name}")
    return name


def _refuse_outside(folder: Path, *paths: Path) -> None:
    """Raise ValueError for a path whose links lead out of a folder, other than to the blobs of its repository.

    The folder that is named may itself be a link.
    """
    within = [folder.resolve(), *_blobs(folder)]
    for path in paths:
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not any(target.is_relative_to(one) for one in within):
            raise ValueError(
                f"{path} leads out of {folder}, to {target}: put a copy in its place, or name that as data"
            )


def _blobs(folder: Path) -> list[Path]:
    """Return where the blobs of a folder's repository are. In the user's own cache they may be on another disk."""
    found = [place.resolve() / "blobs" for place in _repositories(folder)]
    with contextlib.suppress(OSError, RuntimeError):  # links in a circle
        cache = hub_cache.folder().resolve()
        found += [blobs.resolve() for blobs in found if blobs.is_relative_to(cache)]
    return found


def _repositories(folder: Path) -> list[Path]:
    """Return the repository in the cache of the hub in whose snapshots a folder is, as it is named and as it is."""
    places = {place for one in (folder.absolute(), folder.resolve()) for place in (one, *one.parents)}
    return [place.parent.parent for place in places if place.parent.name == "snapshots"]


def _json(folder: Path, path: Path) -> dict[str, Any]:
    _refuse_outside(folder, path)
    try:
        found = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not what save_to_disk writes")
    return found


def _matching(folder: Path, pattern: str) -> list[Path]:
    if pattern.startswith("/") or ".." in Path(pattern).parts:
        raise ValueError(f"{folder / README} names files outside its folder: {pattern}")
    try:
        found = [path for path in folder.glob(pattern) if path.is_file()]
    except (OSError, ValueError, IndexError, RuntimeError) as error:  # as glob raises for "." and much nesting
        why = f": {error}" if isinstance(error, OSError | ValueError) else ""
        raise ValueError(
            f"{folder / README} names files by {shortened(pattern, 80)!r}, which is no pattern{why}"
        ) from None
    _refuse_outside(folder, *found)
    return found


def _default(splits: list[str]) -> str:
    return splits[0] if len(splits) == 1 else TRAIN


def _chosen(folder: Path, what: str, name: str, names: list[str]) -> str:
    if name not in names:
        raise ValueError(f"{folder} has no {what} {name!r}{near_miss(name, names, known=True)}")
    return name
