"""The rollout journal: every finished group goes to disk at once, so a killed rollout is continued, not started over.

rollouts/000012/ has one file per writer (a rank with an engine). A line is the CRC-32 of its payload, a space and the
payload. The first payload is the header (the rollout's number and the fingerprint of the policy that sampled it), every
other one a Group. The CRC starts from the policy's fingerprint, so that no line counts for another policy. Files are
only ever appended to: a kill tears at most the last line, and a line whose CRC is wrong is ignored. Its group is
sampled again, with the same seeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.data.records import Group
from gspo_hpc.system.files import cut_torn_tail, make_private_dir, open_private, plain_disk_full, sync_dir, write_or_cut

_VERSION = 1


class Journal:
    """One writer's file of one rollout. An existing file is continued if it is of the same policy, else replaced."""

    def __init__(self, folder: Path, writer: int, *, fingerprint: str, rollout: int) -> None:
        """Open the file of rank `writer` in `folder` (rollouts/NNNNNN); `fingerprint` is that of the weights."""
        make_private_dir(folder)
        self.path = folder / f"rank-{writer:04d}.journal"
        self._seed = _seed(fingerprint)
        header = _line(json.dumps({"version": _VERSION, "rollout": rollout, "fingerprint": fingerprint}), 0)
        with plain_disk_full(self.path):
            self._fd = open_private(self.path, os.O_RDWR | os.O_CREAT)
            try:
                cut_torn_tail(self._fd)
                if os.pread(self._fd, len(header), 0) != header:
                    os.ftruncate(self._fd, 0)
                    self._end = os.lseek(self._fd, 0, os.SEEK_SET)
                    self._write(header)
                    sync_dir(folder)
            except BaseException:
                os.close(self._fd)
                raise
        self._end = os.fstat(self._fd).st_size

    def append(self, groups: Sequence[Group]) -> None:
        """Append the groups in one write, and return when they are on disk. After an OSError none is in the file."""
        with plain_disk_full(self.path):
            self._write(b"".join(_line(group.to_json(), self._seed) for group in groups))

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        try:
            write_or_cut(self._fd, data, self._end)
        except OSError:
            os.lseek(self._fd, self._end, os.SEEK_SET)
            raise
        self._end += len(data)


def read_journals(folder: Path, fingerprint: str) -> dict[int, Group]:
    """Return the finished groups of a rollout by slot, of all writers, sampled by the policy `fingerprint`.

    Files of another policy and torn or damaged lines are left out. Where a slot is there twice, the first counts, in
    the order of writers and lines.
    """
    groups: dict[int, Group] = {}
    for path in journals(folder):
        for slot, group in read_journal(path, fingerprint).items():
            groups.setdefault(slot, group)
    return groups


def journals(folder: Path) -> list[Path]:
    """Return the files of a rollout, in the order of their writers."""
    return sorted(folder.glob("rank-*.journal"))


def read_journal(path: Path, fingerprint: str) -> dict[int, Group]:
    """Return the finished groups of one writer, as :func:`read_journals` does; nothing if the file is not there."""
    groups: dict[int, Group] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # one line at a time: each has a whole group
        whole = (line[:-1] for line in file if line.endswith(b"\n"))  # what follows the last line break is torn
        if not _is_of(next(whole, b""), fingerprint):
            return groups
        for line in whole:
            payload = _payload(line, _seed(fingerprint))
            if payload is not None:
                group = Group.from_json(payload)
                groups.setdefault(group.slot, group)
    return groups


def retire(rollouts: Path, before_rollout: int) -> None:
    """Delete the journals of the rollouts below `before_rollout`, which no checkpoint needs any more."""
    for folder in rollouts.iterdir() if rollouts.is_dir() else ():
        if folder.name.isdecimal() and int(folder.name) < before_rollout:
            shutil.rmtree(folder)


def _is_of(line: bytes, fingerprint: str) -> bool:
    payload = _payload(line, 0)
    header = json.loads(payload) if payload is not None else {}
    return bool(header.get("version") == _VERSION and header.get("fingerprint") == fingerprint)


def _seed(fingerprint: str) -> int:
    return zlib.crc32(fingerprint.encode())


def _line(payload: str, seed: int) -> bytes:
    data = payload.encode("ascii")  # json.dumps escapes the rest, line breaks too
    return b"%08x %s\n" % (zlib.crc32(data, seed), data)


def _payload(line: bytes, seed: int) -> str | None:
    """Return the payload of a line without its line break, or None if the line is damaged."""
    data = line[9:]
    return data.decode("ascii") if line[:9] == b"%08x " % zlib.crc32(data, seed) else None
