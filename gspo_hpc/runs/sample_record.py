"""The record of samples: groups of some steps with every token, for those who want to look inside a run.

record/ has one file for each rank that held a recorded group, rank-00000.jsonl.gz. It is only appended to: one gzip
member a step, with a line of JSON for each group, so that ``zcat`` and pandas read the file as it is. Steps ascend. A
kill tears at most the last member, which nobody reads; a start of the run cuts the files back to the checkpoint that it
resumes from. A line with `full` says that the record ends there because it reached its size.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_hpc.system.files import make_inner_dir, open_private, plain, plain_disk_full, sync_dir, write_or_cut
from gspo_hpc.system.text import MALFORMED, parse_json

_PIECE = 1 << 20  # bytes of a file that are read at a time
_LEVEL = 6  # of compression

Numbers = list[float | None]  # None where a number was not finite


@dataclass(frozen=True)
class RecordedSample:
    """One completion. Lists have an entry for each of its tokens; they are None where nothing was computed.

    `old_logprobs` may be None in the first update of a rollout too, where the policy that it updates is the one that
    sampled: all ratios are 1.
    """

    index: int
    text: str
    reward: float | None
    reward_parts: dict[str, float | None]
    failure: str | None
    excluded: bool
    advantage: float | None
    truncated: bool
    weights_version: int  # steps that had made the weights that sampled it
    seed: int
    tokens: list[int]
    token_texts: list[str]
    rollout_logprobs: Numbers  # of the engine
    old_logprobs: Numbers | None  # of the policy that sampled, by the trainer
    logprobs: Numbers | None  # of the policy that the step updated
    reference_logprobs: Numbers | None
    ratios: Numbers | None  # exp(log-prob - old log-prob)
    outcomes: dict[str, str] = field(default_factory=dict)  # by reward function, of those that failed or tell it

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class RecordedGroup:
    """A prompt and its completions in one step."""

    step: int
    rollout: int
    update: int
    slot: int
    prompt_index: int  # row of the data set
    prompt: str
    prompt_length: int  # tokens
    fields: dict[str, Any]
    samples: list[RecordedSample] = field(default_factory=list)


@dataclass(frozen=True)
class RecordedStep:
    """The recorded groups of a step, by slot, of all ranks."""

    step: int
    groups: list[RecordedGroup]


@dataclass(frozen=True)
class End:
    """The step from which on nothing is recorded, and the size in MB that the record would have exceeded."""

    step: int
    limit_mb: float


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank:05d}.jsonl.gz"


def packed(rows: Sequence[RecordedGroup | End]) -> bytes:
    """Return what is appended for a step: one gzip member, the same bytes for the same rows."""
    lines = [{"step": row.step, "full": row.limit_mb} if isinstance(row, End) else asdict(row) for row in rows]
    text = "".join(json.dumps(plain(line), allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    return gzip.compress(text.encode(), _LEVEL, mtime=0)


def append(path: Path, member: bytes) -> None:
    """Append what :func:`packed` returned, and return when it is on disk; on an error, nothing of it."""
    make_inner_dir(path.parent)
    with plain_disk_full(path):
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            write_or_cut(fd, member, size)
        finally:
            os.close(fd)
        if size == 0:
            sync_dir(path.parent)


def cut(folder: Path, after_step: int) -> None:
    """Drop what is recorded of steps above `after_step`, and what a kill tore."""
    for path in _files(folder):
        keep = 0
        for end, rows in _members(path):
            if any(_step_of(row) > after_step for row in rows):
                break
            keep = end
        if keep < path.stat().st_size:
            fd = open_private(path, os.O_WRONLY)
            try:
                os.ftruncate(fd, keep)
                os.fsync(fd)
            finally:
                os.close(fd)


def size(folder: Path) -> int:
    """Return the bytes of the whole record."""
    return sum(path.stat().st_size for path in _files(folder))


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes with the record: the files, their sizes, and when they were last written."""
    found = [(path.name, path.stat()) for path in _files(folder)]
    return [(name, one.st_size, one.st_mtime_ns) for name, one in found]


def end(folder: Path) -> End | None:
    """Return where the record ended for its size, the latest place if there are several; None if it did not."""
    found = [one for path in _files(folder) for _, rows in _members(path) for row in rows if (one := _end(row))]
    return max(found, key=lambda one: one.step, default=None)


def steps(folder: Path) -> Iterator[RecordedStep]:
    """Yield the recorded steps in order, one at a time in memory. Lines that are no groups are left out."""
    merged = heapq.merge(*(_groups(path) for path in _files(folder)), key=lambda group: group.step)
    for step, groups in itertools.groupby(merged, key=lambda group: group.step):
        by_slot: dict[int, RecordedGroup] = {}
        for group in groups:
            by_slot.setdefault(group.slot, group)
        yield RecordedStep(step, [by_slot[slot] for slot in sorted(by_slot)])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.jsonl.gz"))


def _groups(path: Path) -> Iterator[RecordedGroup]:
    last = -1
    for _, rows in _members(path):
        for row in rows:
            with contextlib.suppress(*MALFORMED):
                group = _group(row)
                if group.step >= last:  # heapq.merge needs them in order
                    last = group.step
                    yield group


def _members(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the rows of each whole member, with the place in the file where it ends; stop at the first that is not."""
    with contextlib.suppress(OSError, zlib.error), path.open("rb") as file:
        rest = b""
        while True:
            unpack, parts = zlib.decompressobj(wbits=31), []
            while not unpack.eof:
                piece = rest or file.read(_PIECE)
                rest = b""
                if not piece:
                    return
                parts.append(unpack.decompress(piece))
            rest = unpack.unused_data
            yield file.tell() - len(rest), list(_rows(b"".join(parts)))


def _rows(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(row := parse_json(line), dict):
                yield row


def _step_of(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return step if type(step) is int else 0


def _end(row: Mapping[str, Any]) -> End | None:
    limit = row.get("full")
    known = isinstance(limit, int | float) and not isinstance(limit, bool)
    return End(_step_of(row), float(limit or 0)) if known else None


def _group(row: Mapping[str, Any]) -> RecordedGroup:
    """Return the group of a line. Raises one of MALFORMED for any other line."""
    return RecordedGroup(
        **{name: _whole(row[name]) for name in ("step", "rollout", "update", "slot", "prompt_index", "prompt_length")},
        prompt=_text(row["prompt"]),
        fields=dict(row["fields"]),
        samples=[_sample(one) for one in row["samples"]],
    )


def _sample(row: Mapping[str, Any]) -> RecordedSample:
    tokens = [_whole(one) for one in row["tokens"]]
    lists = {
        name: _numbers(row[name], len(tokens))
        for name in ("rollout_logprobs", "old_logprobs", "logprobs", "reference_logprobs", "ratios")
    }
    texts = [_text(one) for one in row["token_texts"]]
    if len(texts) != len(tokens) or lists["rollout_logprobs"] is None:
        raise ValueError("a list is missing, or has another length than the tokens")
    return RecordedSample(
        index=_whole(row["index"]),
        text=_text(row["text"]),
        reward=_number(row["reward"]),
        reward_parts={str(name): _number(one) for name, one in row["reward_parts"].items()},
        outcomes={str(name): _text(one) for name, one in row.get("outcomes", {}).items()},
        failure=None if row["failure"] is None else _text(row["failure"]),
        excluded=row["excluded"] is True,
        advantage=_number(row["advantage"]),
        truncated=row["truncated"] is True,
        weights_version=_whole(row["weights_version"]),
        seed=_whole(row["seed"]),
        tokens=tokens,
        token_texts=texts,
        **lists,  # type: ignore[arg-type]  # that of the engine was checked
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _number(value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise ValueError(f"{value!r} is not a number")


def _numbers(values: Any, count: int) -> Numbers | None:
    if values is None:
        return None
    found = [_number(one) for one in values]
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers for {count} tokens")
    return found
