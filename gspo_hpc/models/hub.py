"""Models by their names on the Hugging Face hub: taken from the local cache, or downloaded into it.

The cache is the one of huggingface_hub and transformers (HF_HUB_CACHE, HF_HOME). Its layout is documented
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache), and is read here without the library, so that `plan`
needs neither the library nor a network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from gspo_hpc.config.schema import Config, replace
from gspo_hpc.system.text import first_line

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configs, tokenizers, chat templates
_FOLDERS = ("models", "model", "checkpoints", "ckpts", "weights", "data", "hf")  # usual ones, no owners
_MAIN = "main"


def is_name(path: str) -> bool:
    """Return whether `path` may be OWNER/NAME or OWNER/NAME@REVISION on the hub.

    It is not where OWNER is a folder here, or what people call the folder of their models.
    """
    owner = path.partition("/")[0]
    return _NAME.fullmatch(path) is not None and owner not in _FOLDERS and not os.path.exists(owner)


def absence(path: str) -> tuple[str, str]:
    """Return how to say that there is no model at `path`, and what a run does then."""
    if is_name(path):
        return "is not in the cache of the hub", "downloads the model"
    return "does not exist", "needs the folder itself"


def cached(name: str) -> Path | None:
    """Return the folder of a model in the cache, at the revision that was downloaded last; None if there is none.

    The folder has a config.json; other files may be missing.
    """
    repo, revision = _split(name)
    home = _cache() / f"models--{repo.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text("ascii").strip() if reference.is_file() else revision
    folder = home / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def folder(name: str) -> Path:
    """Return the folder of a whole model, from the cache or else from the hub. Progress goes to standard error.

    Raises ValueError, with the command that fetches the model elsewhere, if neither has it.
    """
    found = cached(name)
    if found is not None and _whole(found):
        return found
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ValueError(_refusal(name, "HF_HUB_OFFLINE is set"))
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(_refusal(name, "huggingface_hub is not installed here")) from None
    repo, revision = _split(name)
    try:
        found = Path(snapshot_download(repo, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # the library's own errors, httpx's and the system's have no base in common
        raise ValueError(_refusal(name, first_line(str(error)) or type(error).__name__)) from error
    if not _whole(found):
        raise ValueError(f"model.path {name}: the hub has no config.json, or no weights in safetensors, of this model")
    return found


def with_folder(config: Config) -> Config:
    """Return the config with the folder of its model, which is downloaded if `model.path` is its name on the hub.

    Raises ValueError if there is no such folder, and the hub cannot give it.
    """
    path = config.model.path
    if path is None or os.path.isdir(path):
        return config
    if not is_name(path):
        raise ValueError(
            f"model.path {path} does not exist: give a Hugging Face model folder, or the model's name on the hub"
        )
    return replace(config, model=replace(config.model, path=str(folder(path))))


def with_cached_folder(config: Config) -> Config:
    """Return the config with the folder of its model in the cache, if all of it is there; else the config itself."""
    path = config.model.path
    if path is None or not is_name(path) or (found := cached(path)) is None or not _whole(found):
        return config
    return replace(config, model=replace(config.model, path=str(found)))


def _split(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"] or _MAIN


def _cache() -> Path:
    """Return the folder that huggingface_hub downloads into."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser().absolute()


def _whole(folder: Path) -> bool:
    """Return whether all files of weights are there, which a download that was ended leaves out."""
    from gspo_hpc.models import weight_files  # only here: a plan needs no weights

    try:
        return (folder / "config.json").is_file() and all(path.is_file() for path in weight_files.paths(folder))
    except ValueError:
        return False


def command(name: str) -> str:
    """Return the command that downloads a model into a folder, and what to write into the config then."""
    repo, revision = _split(name)
    at = "" if revision == _MAIN else f" --revision {revision}"
    here = f"models/{repo.split('/')[1]}"
    return f"hf download {repo}{at} --local-dir {here}; then give model.path={here}"


def _refusal(name: str, reason: str) -> str:
    return (
        f"model.path {name}: there is no such folder, and it cannot be taken from the hub ({reason})\n"
        f"where the hub can be reached: {command(name)}"
    )
