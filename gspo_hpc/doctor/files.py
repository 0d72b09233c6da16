"""Checks of the file system of the run directory: everything that a run does there is tried there."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.doctor import host
from gspo_hpc.doctor.finding import Finding, Section, gib
from gspo_hpc.launch import mounts
from gspo_hpc.system.files import make_private_dir, write_atomically
from gspo_hpc.system.text import GIB

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs")
_FREE = GIB  # bytes that must be free if the size of a checkpoint is not known
_INODES = 10_000


def run_folder(config: Config) -> Path:
    """Return the run directory, or the nearest existing folder above it."""
    return mounts.existing(config.run_dir)


def findings(config: Config, nodes: int, checkpoint: int | None, *, met: bool = False) -> list[Finding]:
    """Return the findings of the group on this machine.

    `checkpoint`: bytes of one checkpoint, if the model is known. `met`: the nodes themselves try whether they share the
    folder.
    """
    section = Section("files")
    folder = run_folder(config)
    if not folder.is_dir():
        fix = "choose another run.dir"
        section.fail("run folder", f"run.dir is {config.run_dir}, but {folder} is a file", fix)
        return section.findings
    mount = mounts.holding(folder)
    if not try_folder(section, folder):
        return section.findings
    judge_mount(section, folder, mount, nodes, met=met)
    section.findings += space(config, checkpoint).findings
    stat = os.statvfs(folder)
    if stat.f_files and stat.f_favail < _INODES:
        fix = "delete old runs: their attempts/ and wandb/ hold many small files"
        section.warn("inodes", f"{folder} has room for only {stat.f_favail:,} more files", fix)
    elif stat.f_files:
        section.ok("inodes", f"{stat.f_favail:,} inodes are free")
    host.judge_clock(section, host.skew_of(folder), f"the file system of {folder}")
    return section.findings


def space(config: Config, checkpoint: int | None) -> Section:
    """Return the finding about free space where the run directory is, or will be. `checkpoint`: bytes, if known."""
    section = Section("files")
    stat = os.statvfs(run_folder(config))
    judge_space(section, stat.f_frsize * stat.f_bavail, checkpoint, config.checkpoint.keep)
    return section


def try_folder(section: Section, folder: Path) -> bool:
    """Write, sync, rename, read back and lock a file, as every run does; return whether all of it worked."""
    scratch = folder / f".doctor-{secrets.token_hex(4)}"
    fix = "choose another run.dir, or get permission from its owner; df -h and quota say whether it is full"
    at = "create a folder"
    try:
        make_private_dir(scratch)
        at, data = "write, sync and rename a file", secrets.token_bytes(2**20)
        write_atomically(scratch / "file", data)
        at = "read a file back"
        if (scratch / "file").read_bytes() != data:
            section.fail("write", f"{folder}: a file has other content than was written", "use another file system")
            return False
        at = "create a file only once (O_EXCL)"
        os.close(os.open(scratch / "once", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            os.close(os.open(scratch / "once", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            pass
        else:
            section.fail("write", f"{folder}: a file can be created twice (O_EXCL)", "use another file system")
            return False
        section.ok("write", f"{folder}: a file was written, synced, renamed and read back")
        return try_lock(section, scratch / "file", folder)
    except OSError as error:
        section.fail("write", f"{folder}: cannot {at}: {error.strerror}", fix)
        return False
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def try_lock(section: Section, path: Path, folder: Path) -> bool:
    """Try the lock that keeps two starts of one run apart (runs.lock.Lock), within this machine."""
    fix = "mount it with locks (Lustre: -o flock; NFS: without nolock and local_lock), or choose another run.dir"
    first, second = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            section.ok("lock", "a lock was taken, and refused to a second process")
            return True
        section.fail("lock", f"{folder}: two processes get the same lock at once", fix)
    except OSError as error:
        section.fail("lock", f"{folder} does not support file locks: {error.strerror}", fix)
    finally:
        os.close(first)
        os.close(second)
    return False


def judge_mount(section: Section, folder: Path, mount: mounts.Mount | None, nodes: int, *, met: bool = False) -> None:
    """Judge whether other nodes share this mount, and whether its locks hold between them."""
    if mount is None:
        section.skip("mount", f"{folder} is not in /proc/self/mountinfo")
        return
    text = f"{folder} is on {mount.kind} at {mount.point}"
    fix = "put run.dir on a file system that all nodes share"
    local_locks = [one for one in sorted(mount.options) if re.match(r"nolock|localflock|local_lock=(all|flock)", one)]
    if nodes == 1:
        if mount.kind in ("tmpfs", "ramfs"):
            section.warn("mount", f"{text}, in memory, and is lost when the machine stops", "put run.dir on a disk")
        else:
            section.ok("mount", text)
    elif local_locks:
        fix = f"mount it without {local_locks[0]} (Lustre: -o flock)"
        text += f" with {local_locks[0]}: its locks hold on one node only, so two jobs could write to one run"
        section.fail("mount", text, fix)
    elif mount.kind in _LOCAL and not met:
        section.warn(
            "mount", f"{text}, which looks like a local disk; --nodes {nodes} tries whether nodes share it", fix
        )
    else:
        section.ok("mount", text)


def judge_space(section: Section, free: int, checkpoint: int | None, keep: int) -> None:
    """Compare free space with the checkpoints: while one is written, there is one more than `keep`."""
    fix = "free some space, lower checkpoint.keep, or choose another run.dir"
    if checkpoint is None:
        enough = free >= _FREE
        section.add("ok" if enough else "warn", "space", f"{gib(free)} are free", "" if enough else fix)
        return
    needed = checkpoint * (keep + 1)
    text = f"{gib(free)} are free; a checkpoint takes {gib(checkpoint)}, and {keep} are kept while another is written"
    if free < checkpoint:
        section.fail("space", text, fix)
    elif free < needed:
        section.warn("space", text, fix)
    else:
        section.ok("space", text)
