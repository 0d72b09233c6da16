"""Tell whether a config, its data and the code of the user's own are those that a run was started with."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_hpc.config import changes as config_changes
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.runs.snapshot import fingerprints

if TYPE_CHECKING:
    from gspo_hpc.runs.directory import RunDir


def refuse_changes(run: RunDir, config: Config) -> None:
    """Raise ValueError where `config`, the data or the reward functions would change an existing run into another."""
    if changed := changes(run, config):
        raise ValueError(changed)


def changes(run: RunDir, config: Config, *, most_bytes: float = math.inf) -> str:
    """Return what of `config`, the data or the reward functions would change an existing run into another, and a fix.

    The text is empty if nothing does. Data of more than `most_bytes` are not read, nor held against those that the run
    began with. Raises ValueError where the directory's record is not that of a run.
    """
    info = run.read_info()
    if missing := {"run_id", "data_sha256", "graders_sha256"} - info.keys():
        raise ValueError(f"{run.info}: not the record of a run: it lacks {', '.join(sorted(missing))}")
    if changed := config_changes.refused_changes(loader.load(run.config), config):
        lines = [f"  {key}: {old} -> {new}" for key, old, new in changed]
        fix = "These keys cannot change within a run: restore the old values, or give another run.name or run.dir."
        return "\n".join([f"{run.path} was started with another config:", *lines, fix])
    files = []
    given = _training(config)
    if math.isinf(most_bytes) or sum(map(_size, given.values())) <= most_bytes:
        before = info["data_sha256"]  # a hash by the key of a source, or that of data.train
        told = before if isinstance(before, dict) else {"data.train": before}
        files += [(key, path, told.get(key), data_hash(path)) for key, path in given.items()]
    then, own = info["graders_sha256"], fingerprints(config)
    models = {one.path for one in config.reward.models}
    files += [
        ("the reward model" if name in models else "the code of your own", name, then.get(name), own.get(name))
        for name in then | own
    ]
    for what, name, before, now in files:
        if before != now:
            return (
                f"{what} ({name}) is not the {'folder' if name in models else 'file'} {run.path} was started with: "
                f"sha256 {str(before)[:12]} -> {str(now)[:12]}; restore the old one, or start another run"
            )
    return ""


def made_progress(run: RunDir) -> bool:
    """Return whether a run has made a step or has a checkpoint, damaged or not.

    One that has neither holds nothing that other settings would contradict, once its rollouts are gone: it may take
    them. Raises ValueError where metrics.jsonl cannot be read.
    """
    from gspo_hpc.runs import commit  # only here: threads and hashes, which most commands can do without

    return any(record["step"] > 0 for record in run.read_metrics()) or commit.holds_any(run.checkpoints)


def data_hashes(config: Config) -> str | dict[str, str | None] | None:
    """Return the SHA-256 of data.train, or of the files of each source by its key."""
    if not config.data.sources:
        return data_hash(config.data.train)
    return {key: data_hash(path) for key, path in _training(config).items()}


def _training(config: Config) -> dict[str, str]:
    """Return the paths of what is trained on, by their keys."""
    from gspo_hpc.data.sources import parts  # only here: most commands look at runs that are there

    return {one.key: one.path for one in parts.training(config.data)}


def _data_files(path: str | None) -> list[Path]:
    from gspo_hpc.data import counting  # only here: most commands look at runs that are there

    return [] if path is None else [file for file in counting.files(path) if file.is_file()]


def _size(path: str | None) -> int:
    """Return the bytes of a file of data, or of all files that a pattern matches."""
    return sum(file.stat().st_size for file in _data_files(path))


def data_hash(path: str | None) -> str | None:
    """Return the SHA-256 of a file of data, in hex, or of those of all files that a pattern matches, in their order."""
    digests = []
    for name in _data_files(path):
        with open(name, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256"))
    if len(digests) > 1:
        return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
    return digests[0].hexdigest() if digests else None
