"""Reading metrics.jsonl record by record while it grows, with the samples that belong to each record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.text import parse_json
from gspo_hpc.trackers.protocol import Record, Sent

_MOST = 256  # records that are returned at once: a tracker that begins late gets them in pieces
_PIECE = 2**20  # bytes that are read at once


class MetricsReader:
    """A cursor in metrics.jsonl, behind what a tracker has."""

    def __init__(self, run: RunDir, sent: Sent) -> None:
        self._metrics, self._samples = _Lines(run.metrics), _Lines(run.samples)
        self._sent, self._first = sent, sent.step
        self._rows: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}  # samples by the step of their record

    def read(self) -> list[Record]:
        """Return the next records, those with the lowest steps first; an empty list if there are none for now."""
        found: list[Record] = []
        for line in self._metrics:
            record = _record(line)
            if record is not None and (record := self._rest(record)) is not None:
                found.append(record)
                if len(found) == _MOST:
                    break
        return [self._with_samples(record) for record in found]

    def _rest(self, record: Record) -> Record | None:
        """Return what the tracker does not have of a record; None if it has all of it."""
        step, keys = self._sent.step, self._sent.keys
        if record.step < step or (record.step == step and keys is None):
            return None
        if record.step == step and keys is not None:
            missing = {key: value for key, value in record.values.items() if key not in keys}
            record = Record(record.step, record.time, missing)
            if not record.curves:
                return None
        self._sent = Sent(record.step)
        return record

    def _with_samples(self, record: Record) -> Record:
        """Return the record with its samples, which are on disk before it is."""
        for line in self._samples:
            row = _mapping(line)
            step = row.get("step")
            if isinstance(step, int) and step >= self._first:
                # A rollout is shown when the step before its first update is done; an evaluation belongs to its step.
                belongs = step + 1 if row.get("phase") == "train" else step
                key = (str(row.get("phase")), str(row.get("prompt")))  # once, however often a killed rollout is shown
                self._rows.setdefault(belongs, {})[key] = row
        for step in [one for one in self._rows if one < record.step]:
            del self._rows[step]
        rows = self._rows.pop(record.step, {})
        return Record(record.step, record.time, record.values, tuple(rows.values()))


class _Lines:
    """The whole lines of a file that grows, each yielded once; from its beginning again where the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def __iter__(self) -> Iterator[bytes]:
        self._follow()
        while self._file is not None:
            line, newline, after = self._rest.partition(b"\n")
            if newline:
                self._rest = after
                yield line
            elif piece := self._file.read(_PIECE):
                self._rest += piece
            else:  # a line that is not whole is read again: what a kill left of one is cut off by the next writer
                self._file.seek(-len(self._rest), os.SEEK_CUR)
                self._rest = b""
                return

    def _follow(self) -> None:
        """Open the file that the path leads to now; metrics.jsonl is replaced when an attempt cuts it back."""
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return
        if self._file is not None:
            known = os.fstat(self._file.fileno())
            if (known.st_dev, known.st_ino) == (now.st_dev, now.st_ino) and self._file.tell() <= now.st_size:
                return
            self._file.close()
        self._file, self._rest = open(self._path, "rb"), b""


def _record(line: bytes) -> Record | None:
    """Return the numbers of a line of metrics.jsonl; None if it is no record."""
    raw = _mapping(line)
    step = raw.get("step")
    if type(step) is not int:
        return None
    values = {
        key: float(value) if isinstance(value, float) else int(value)
        for key, value in raw.items()
        if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max  # no metric's are larger
    }
    return Record(step, float(values.get("time", time.time())), values)


def _mapping(line: bytes) -> dict[str, Any]:
    try:
        raw = parse_json(line)
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}
