"""Checkpoint directories that are whole or absent.

All ranks write a checkpoint into a staging directory (``.tmp-000010``). One rank then commits it: it syncs every file,
hashes those that their writers have not hashed, writes MANIFEST.json with sizes and hashes and COMMITTED with the
manifest's own hash, and renames the directory to ``000010``. A process that is killed before the rename leaves no
checkpoint. A checkpoint that is saved again replaces the old one, which is called ``.old-000010`` for the instant
between the two renames.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_hpc.system.files import (
    Entry,
    make_private_dir,
    plain_disk_full,
    read_json,
    remove_tree,
    sync_dir,
    write_atomically,
    write_json,
)
from gspo_hpc.system.progress import following, mark

MANIFEST, COMMITTED = "MANIFEST.json", "COMMITTED"
_STAGING, _OLD, _DAMAGED = ".tmp-", ".old-", "damaged-"
_PIECE = 2**22  # bytes of a file that are hashed between two signs of life
_THREADS = 8  # hashing and syncing release the interpreter lock


def staging_path(root: Path, step: int) -> Path:
    """Return the directory where the checkpoint of `step` is written, the same on every rank."""
    return root / f"{_STAGING}{step:06d}"


def begin(root: Path, step: int) -> Path:
    """Make an empty staging directory. One rank calls this; the others wait, then write into :func:`staging_path`."""
    staging = staging_path(root, step)
    make_private_dir(root)
    if staging.exists():
        remove_tree(staging)
    make_private_dir(staging)
    return staging


def commit(
    staging: Path, step: int, extra: Mapping[str, Any] | None = None, known: Mapping[str, Entry] | None = None
) -> Path:
    """Make the content of `staging` the checkpoint of `step`, and return its final path.

    `extra` goes into its manifest. `known` holds size and hash of files whose writers know them, by their path below
    `staging`; these are not read again. One rank calls this, after all have written. Raises OSError, with nothing
    committed, where the disk fails, or lacks a file that was written.
    """
    root, final = staging.parent, staging.parent / f"{step:06d}"
    with plain_disk_full(final):
        paths = sorted(staging.rglob("*"))
        folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
        files = [path for path in paths if path not in set(folders)]
        assert files and not any(path.is_symlink() for path in files), f"{staging}: nothing, or a link, to commit"
        names, known = [str(path.relative_to(staging)) for path in files], known or {}
        if missing := sorted(known.keys() - set(names)):
            raise OSError(
                f"{staging} lacks {len(missing)} of the {len(known)} files that were written, {missing[0]} among them: "
                "is it on a disk that all nodes share, and does nothing else remove files there?"
            )
        with following(), ThreadPoolExecutor(_THREADS) as pool:
            entries = dict(zip(names, pool.map(_seal, files, map(known.get, names)), strict=True))
        for folder in folders:
            folder.chmod(0o700)
            sync_dir(folder)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = {"version": 1, "step": step, "created": created, "extra": dict(extra or {}), "files": entries}
        write_json(staging / MANIFEST, manifest)
        write_atomically(staging / COMMITTED, _hash(staging / MANIFEST) + "\n")  # syncs the directory, too
        old = root / f"{_OLD}{step:06d}"
        if final.exists():
            if old.exists():
                remove_tree(old)
            os.rename(final, old)
        os.rename(staging, final)
        sync_dir(root)
        if old.exists():
            remove_tree(old)
    return final


def list_committed(root: Path) -> list[Path]:
    """Return the committed checkpoints in the order of their steps, without reading them: see :func:`verify`."""
    return [path for path in _steps(root).values() if (path / COMMITTED).is_file()]


def holds_any(root: Path) -> bool:
    """Return whether there is a checkpoint that was once committed, be it damaged or in the middle of a replacement."""
    return root.is_dir() and any(not path.name.startswith(_STAGING) for path in root.iterdir())


def verify(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Read and hash the files of a committed checkpoint, and return what is wrong; an empty list if it is whole.

    Of several processes that share the work, each gives its number `part`, from 0, and reads as much as the others.
    """
    if not (path / COMMITTED).is_file():
        return [f"{COMMITTED} is missing"]
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    if (path / COMMITTED).read_bytes() != _hash(path / MANIFEST).encode() + b"\n":
        return [f"{MANIFEST} or {COMMITTED} was changed"]
    try:
        files = _entries(path)
    except ValueError as error:  # the hash is right, so whoever committed it wrote this
        return [str(error)]

    def check(name: str) -> str | None:
        file, entry = path / name, files[name]
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        return None if _hash_in_steps(file) == entry["sha256"] else f"{name} was changed: its SHA-256 is another"

    mine = sorted(files, key=lambda name: (-files[name]["size"], name))[part::parts]
    with following(), ThreadPoolExecutor(_THREADS) as pool:
        return [problem for problem in pool.map(check, sorted(mine)) if problem is not None]


def read_extra(path: Path) -> dict[str, Any]:
    """Return what :func:`commit` got as `extra`. Raises ValueError for a manifest that has none."""
    manifest = read_json(path / MANIFEST)
    extra = manifest.get("extra") if isinstance(manifest, dict) else None
    if not isinstance(extra, dict):
        raise ValueError(f"{path / MANIFEST} has no mapping `extra`: no run of this package wrote it")
    return extra


def _entries(path: Path) -> dict[str, Entry]:
    """Return size and hash of each file, as the manifest has them. Raises ValueError for other content."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{MANIFEST} lists no files")
    for name, entry in files.items():
        told = isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        if not told:
            raise ValueError(f"{MANIFEST} has no size and SHA-256 of {name}")
    return files


def newest_whole(
    root: Path, *, put_aside: bool = False, verify: Callable[[Path], list[str]] = verify
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, or None, and a remark on every newer one, which is damaged.

    `verify` says what is wrong with a checkpoint. With `put_aside` the damaged ones are renamed to damaged-NNNNNN, so
    that a run that resumes does not count them among those that it keeps. Only the holder of the run's lock may ask for
    that.
    """
    remarks: list[str] = []
    for step, path in sorted(_steps(root).items(), reverse=True):
        problems = verify(path)
        if not problems:
            return path, remarks
        more = f", and {len(problems) - 2} more" if len(problems) > 2 else ""
        remark = f"checkpoint {step} is damaged and not used: {'; '.join(problems[:2])}{more}"
        if put_aside:
            aside = _unused(root / f"{_DAMAGED}{step:06d}")
            os.rename(path, aside)
            sync_dir(root)
            remark += f" (now {aside.name})"
        remarks.append(remark)
    return None, remarks


def clean_staging(root: Path) -> None:
    """Remove what killed saves left, and put back an old checkpoint if a kill came between the two renames.

    Only the holder of the run's lock may call this.
    """
    for path in root.iterdir() if root.is_dir() else ():
        if path.name.startswith(_OLD):
            final = root / path.name.removeprefix(_OLD)
            if final.exists():
                remove_tree(path)
            else:
                os.rename(path, final)
        elif path.name.startswith(_STAGING):
            remove_tree(path)


def retain(root: Path, keep: int) -> None:
    """Delete all committed checkpoints but the newest `keep`."""
    assert keep >= 1
    for path in list_committed(root)[:-keep]:
        doomed = _unused(
            root / f"{_STAGING}{path.name}-retired"
        )  # no checkpoint from here on, and cleaned up later if this is killed
        os.rename(path, doomed)
        remove_tree(doomed)


def _steps(root: Path) -> dict[int, Path]:
    """Return the checkpoint directories by step, in order, committed or not."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():  # in reverse, ".old-" comes after digits
        number = path.name.removeprefix(_OLD)
        if number.isdecimal() and path.is_dir():
            found.setdefault(int(number), path)
    return dict(sorted(found.items()))


def _seal(path: Path, known: Entry | None) -> Entry:
    """Sync a file, make it private, and return its size and hash."""
    with path.open("rb") as file:
        os.fchmod(file.fileno(), 0o600)
        size = os.fstat(file.fileno()).st_size
        if known is not None and known["size"] != size:
            raise OSError(f"{path} has {size} bytes, {known['size']} were written; does another process write there?")
        entry = known or {"size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        os.fsync(file.fileno())
        mark()
        return entry


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_in_steps(path: Path) -> str:
    """Return the hash of a file, and tell the watcher of this process about every piece: the whole may take minutes."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            found.update(piece[:size])
            mark()
    return found.hexdigest()


def _unused(path: Path) -> Path:
    """Return `path`, with a number behind it if that name is taken."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
