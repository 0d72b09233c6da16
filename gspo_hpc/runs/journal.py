"""The rollout journal: every finished group goes to disk at once, so a killed rollout is continued, not started over.

rollouts/000012/ has one file per writer (a rank with an engine). A line is the CRC-32 of its payload, a space and the
payload. The first payload is the header (the rollout's number and the fingerprint of the policy that sampled it), every
other one a Group. The CRC starts from the policy's fingerprint, so that no line counts for another policy. Files are
only ever appended to: a kill tears at most the last line, and a line whose CRC is wrong, or which holds no group, is
ignored. Its group is sampled again, with the same seeds.

Where a rollout ends before all of its groups are finished (rollout.unfinished: continue), files of the same form have
what was sampled of the others, and finished groups that were not used. A later rollout finds each at its place.

Where reward models score, a second file of a writer has the finished groups once more, each with its scores.

Where the model talks with an environment, a second file of the writer has every turn of its conversations, in the same
form: those of groups that are not finished go on behind their last turn, and no environment is asked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Literal

from gspo_hpc.data.records import Group
from gspo_hpc.data.turns import TurnRecord
from gspo_hpc.system.files import (
    cut_torn_tail,
    make_inner_dir,
    open_private,
    plain_disk_full,
    refuse_link,
    sync_dir,
    write_or_cut,
)
from gspo_hpc.system.text import MALFORMED, parse_json

_VERSION = 1

# Groups that are finished; turns of conversations; what a rollout left unfinished; finished groups that it did not use;
# groups that have the scores of reward models, too.
Kind = Literal["journal", "turns", "unfinished", "spare", "scored"]
CARRIED: tuple[Kind, ...] = ("spare", "unfinished")  # those that a later rollout takes its groups from


class Journal:
    """One writer's file of one rollout. An existing file is continued if it is of the same policy, else replaced."""

    def __init__(
        self,
        folder: Path,
        writer: int,
        *,
        fingerprint: str,
        rollout: int,
        kind: Kind = "journal",
    ) -> None:
        """Open the file of rank `writer` in `folder` (rollouts/NNNNNN); `fingerprint` is that of the weights.

        `kind`: see :data:`Kind`. Raises ValueError where the folder, or the one that it is in, is a link.
        """
        refuse_link(folder.parent)
        make_inner_dir(folder)
        self.path = folder / f"rank-{writer:04d}.{kind}"
        self._folder, self._writer, self._fingerprint, self._rollout = folder, writer, fingerprint, rollout
        self._turns: Journal | None = None
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

    def append_turns(self, turns: Sequence[TurnRecord]) -> None:
        """Append turns of conversations in one write, and return when they are on disk."""
        if self._turns is None:
            self._turns = Journal(
                self._folder, self._writer, fingerprint=self._fingerprint, rollout=self._rollout, kind="turns"
            )
        with plain_disk_full(self._turns.path):
            self._turns._write(b"".join(_line(turn.to_json(), self._seed) for turn in turns))

    def turns(self, slots: Container[int]) -> dict[tuple[int, int], list[TurnRecord]]:
        """Return the turns of these slots that are on disk, of all writers, in their order, by slot and sample."""
        return read_turns(self._folder, self._fingerprint, slots)

    def close(self) -> None:
        """Close the file and that of turns. Calling it again does nothing."""
        if self._turns is not None:
            self._turns.close()
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


def scored(folder: Path) -> list[Path]:
    """Return the files of a rollout whose groups have the scores of reward models, in the order of their writers."""
    return sorted(folder.glob("rank-*.scored"))


def read_journal(path: Path, fingerprint: str) -> dict[int, Group]:
    """Return the finished groups of one writer, as :func:`read_journals` does; nothing if the file is not there."""
    groups: dict[int, Group] = {}
    for payload in _payloads(path, fingerprint):
        if (group := _group(payload)) is not None:
            groups.setdefault(group.slot, group)
    return groups


def _payloads(path: Path, fingerprint: str) -> Iterator[str]:
    """Yield the payloads behind the header that are whole; none of another policy's file, or of none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # one line at a time: each has a whole group
        whole = (line[:-1] for line in file if line.endswith(b"\n"))  # what follows the last line break is torn
        if not _is_of(next(whole, b""), fingerprint):
            return
        for line in whole:
            payload = _payload(line, _seed(fingerprint))
            if payload is not None:
                yield payload


def places(path: Path, fingerprint: str) -> dict[int, tuple[int, int]]:
    """Return by slot where the groups of a file are: offset and bytes. The first counts, as of groups.

    Files of another policy and damaged lines have none.
    """
    found: dict[int, tuple[int, int]] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        header = file.readline()
        if not header.endswith(b"\n") or not _is_of(header[:-1], fingerprint):
            return found
        offset = len(header)
        for line in file:
            payload = _payload(line[:-1], _seed(fingerprint)) if line.endswith(b"\n") else None
            if payload is not None and (group := _group(payload)) is not None:
                found.setdefault(group.slot, (offset, len(line)))
            offset += len(line)
    return found


def read_place(path: Path, fingerprint: str, offset: int, length: int) -> Group | None:
    """Return the group at a place of :func:`places`; None if it is damaged or not there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        line = file.read(length)
        payload = _payload(line[:-1], _seed(fingerprint)) if line.endswith(b"\n") else None
        return None if payload is None else _group(payload)
    return None


def read_turns(
    folder: Path, fingerprint: str, slots: Container[int] | None = None
) -> dict[tuple[int, int], list[TurnRecord]]:
    """Return the turns of a rollout's conversations that the policy `fingerprint` led, in order, by slot and sample.

    `slots`: of which; by default of all. Only turns without a gap between them and the first of them count. Of a turn
    that is there twice, the first does, as of groups.
    """
    found: dict[tuple[int, int], dict[int, TurnRecord]] = {}
    for path in sorted(folder.glob("rank-*.turns")):
        for payload in _payloads(path, fingerprint):
            try:
                turn = TurnRecord.from_json(payload)
            except MALFORMED:
                continue
            if slots is None or turn.slot in slots:
                found.setdefault((turn.slot, turn.sample), {}).setdefault(turn.turn, turn)
    return {key: list(_without_gap(turns)) for key, turns in found.items()}


def _without_gap(turns: dict[int, TurnRecord]) -> Iterator[TurnRecord]:
    first = min(turns)  # above 0 where the conversation began in an earlier rollout
    for number in range(first, first + len(turns)):
        if number not in turns:
            return
        yield turns[number]


def retire(rollouts: Path, before_rollout: int) -> None:
    """Delete the journals of the rollouts below `before_rollout`, which no checkpoint needs any more."""
    for folder in rollouts.iterdir() if rollouts.is_dir() else ():
        if folder.name.isdecimal() and int(folder.name) < before_rollout:
            shutil.rmtree(folder)


def _is_of(line: bytes, fingerprint: str) -> bool:
    payload = _payload(line, 0)
    try:
        header = parse_json(payload or "")
    except ValueError:
        return False
    told = header if isinstance(header, dict) else {}
    return bool(told.get("version") == _VERSION and told.get("fingerprint") == fingerprint)


def _group(payload: str) -> Group | None:
    """Return the group of a payload; None for another one, whose line then counts as damaged."""
    try:
        return Group.from_json(payload)
    except MALFORMED:
        return None


def _seed(fingerprint: str) -> int:
    return zlib.crc32(fingerprint.encode())


def _line(payload: str, seed: int) -> bytes:
    data = payload.encode("ascii")  # json.dumps escapes the rest, line breaks too
    return b"%08x %s\n" % (zlib.crc32(data, seed), data)


def _payload(line: bytes, seed: int) -> str | None:
    """Return the payload of a line without its line break, or None if the line is damaged."""
    data = line[9:]
    return data.decode("ascii") if data.isascii() and line[:9] == b"%08x " % zlib.crc32(data, seed) else None
