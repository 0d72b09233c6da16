"""The file system that runs are kept on: what run directories do there, tried there.

Floor 6.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc import doctor_host
from gspo_hpc.config import Config
from gspo_hpc.doctor_finding import Finding, Section, gib
from gspo_hpc.durable import make_private_dir, write_atomically

NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.weka",
    "wekafs",
    "panfs",
    "9p",
    "fuse.sshfs",
)
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs")
_FREE = 2**30  # where the size of a checkpoint is not known
_INODES = 10_000


@dataclass(frozen=True)
class Mount:
    """Where a path is mounted."""

    point: str
    kind: str  # ext4, nfs4 ...
    options: frozenset[str]


def run_folder(config: Config) -> Path:
    """The run directory, or the nearest that is there of those that will hold it."""
    path = Path(os.path.abspath(config.run_dir))
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def findings(config: Config, nodes: int, checkpoint: int | None, *, met: bool = False) -> list[Finding]:
    """All lines of the group, tried on this machine. `checkpoint`: bytes of one, where the model is known. `met`: the
    nodes try themselves whether they see the same."""
    section = Section("files")
    folder = run_folder(config)
    if not folder.is_dir():
        fix = "give another run.dir"
        section.fail("run folder", f"{folder} is a file, and run.dir is {config.run_dir}", fix)
        return section.findings
    mount = mount_of(folder, Path("/proc/self/mountinfo").read_text())
    if not try_folder(section, folder):
        return section.findings
    judge_mount(section, folder, mount, nodes, met=met)
    stat = os.statvfs(folder)
    judge_space(section, stat.f_frsize * stat.f_bavail, checkpoint, config.checkpoint.keep)
    if stat.f_files and stat.f_favail < _INODES:
        fix = "old runs: their attempts/ and wandb/ have many small files"
        section.warn("inodes", f"{stat.f_favail:,} files can still be made in {folder}", fix)
    elif stat.f_files:
        section.ok("inodes", f"{stat.f_favail:,} free")
    doctor_host.judge_clock(section, doctor_host.skew_of(folder), f"the file system of {folder}")
    return section.findings


def try_folder(section: Section, folder: Path) -> bool:
    """Write, sync, rename, read back, lock, link nothing over: what every run does. Whether all of it worked."""
    scratch = folder / f".doctor-{secrets.token_hex(4)}"
    fix = "another run.dir, or its owner's permission; df -h and quota say whether it is full"
    at = "made"
    try:
        make_private_dir(scratch)
        at, data = "written, synced and renamed", secrets.token_bytes(2**20)
        write_atomically(scratch / "file", data)
        at = "read back"
        if (scratch / "file").read_bytes() != data:
            section.fail(
                "write", f"{folder}: what was written is not what is read", "another file system: it is broken"
            )
            return False
        at = "made once only (O_EXCL)"
        os.close(os.open(scratch / "once", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            os.close(os.open(scratch / "once", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            pass
        else:
            section.fail("write", f"{folder}: a file can be made twice (O_EXCL)", "another file system")
            return False
        section.ok("write", f"{folder}: written, synced, renamed and read back")
        return try_lock(section, scratch / "file", folder)
    except OSError as error:
        section.fail("write", f"{folder}: nothing can be {at}: {error.strerror}", fix)
        return False
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def try_lock(section: Section, path: Path, folder: Path) -> bool:
    """The lock that keeps two starts of one run apart (rundir.Lock), within this machine."""
    fix = "mount it with locks (Lustre: -o flock; NFS: without nolock and local_lock), or another run.dir"
    first, second = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            section.ok("lock", "taken, and refused to a second who asks")
            return True
        section.fail("lock", f"{folder}: two processes get the same lock at once", fix)
    except OSError as error:
        section.fail("lock", f"{folder} has no file locks: {error.strerror}", fix)
    finally:
        os.close(first)
        os.close(second)
    return False


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """Where a path is mounted, by the text of /proc/self/mountinfo (proc(5))."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        words = line.split()
        if "-" not in words[6:]:
            continue
        dash = words.index("-", 6)
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = frozenset(",".join((words[5], *words[dash + 3 :])).split(","))
            best = Mount(point, words[dash + 1], options)
    return best


def judge_mount(section: Section, folder: Path, mount: Mount | None, nodes: int, *, met: bool = False) -> None:
    """Whether other nodes see the same, and its locks."""
    if mount is None:
        section.skip("mount", f"{folder}: not in /proc/self/mountinfo")
        return
    text = f"{folder}: {mount.kind} at {mount.point}"
    fix = "run.dir on a file system that all nodes share"
    local_locks = [one for one in sorted(mount.options) if re.match(r"nolock|localflock|local_lock=(all|flock)", one)]
    if nodes == 1:
        if mount.kind in ("tmpfs", "ramfs"):
            section.warn("mount", f"{text}: in memory, and gone with the machine", "run.dir on a disk")
        else:
            section.ok("mount", text)
    elif local_locks:
        fix = "mount it without that (Lustre: -o flock): two jobs on one run would not notice each other"
        section.fail("mount", f"{text} with {local_locks[0]}: locks hold on one node only", fix)
    elif mount.kind in _LOCAL and not met:
        section.warn("mount", f"{text}: looks like a disk of this machine alone; --nodes {nodes} tries it", fix)
    else:
        section.ok("mount", text)


def judge_space(section: Section, free: int, checkpoint: int | None, keep: int) -> None:
    """Free space against checkpoints: one more than are kept exists while it is written."""
    fix = "free some, a lower checkpoint.keep, or another run.dir"
    if checkpoint is None:
        enough = free >= _FREE
        section.add("ok" if enough else "warn", "space", f"{gib(free)} free", "" if enough else fix)
        return
    needed = checkpoint * (keep + 1)
    text = f"{gib(free)} free; a checkpoint takes {gib(checkpoint)}, {keep} are kept and one is being written"
    if free < checkpoint:
        section.fail("space", text, fix)
    elif free < needed:
        section.warn("space", text, fix)
    else:
        section.ok("space", text)
