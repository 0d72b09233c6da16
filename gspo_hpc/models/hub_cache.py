"""The local cache of the Hugging Face hub: repositories of models and datasets, and how they get there.

The cache is the one of huggingface_hub and transformers (HF_HUB_CACHE, HF_HOME). Its layout is documented
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache), and is read here without the library, so that `plan`
needs neither the library nor a network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gspo_hpc.system.text import first_line

MAIN = "main"
REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"  # OWNER/NAME
FOLDERS = ("models", "model", "checkpoints", "ckpts", "weights", "data", "hf")  # usual ones, no owners
Kind = Literal["model", "dataset"]


class NotFetched(Exception):
    """A repository that the hub did not give; the text is the reason."""


def snapshot(kind: Kind, repo: str, revision: str) -> Path:
    """Return the folder of a repository in the cache at the revision that was downloaded last; it may not exist."""
    home = folder() / f"{kind}s--{repo.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text("ascii").strip() if reference.is_file() else revision
    return home / "snapshots" / commit


def download(kind: Kind, repo: str, revision: str, patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match, and return its folder. Progress goes to standard error.

    Raises NotFetched where no hub can be reached, or where it does not have the repository.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NotFetched("HF_HUB_OFFLINE is set")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise NotFetched("huggingface_hub is not installed here: pip install 'gspo-hpc[hub]'") from None
    try:
        return Path(snapshot_download(repo, repo_type=kind, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the library's own errors, httpx's and the system's have no base in common
        raise NotFetched(f"{type(error).__name__}: {first_line(str(error))}") from error


def folder() -> Path:
    """Return the folder that huggingface_hub downloads into."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser().absolute()
