"""Rows of a data file: read, and checked one by one, before a run starts.

No numpy, for commands that answer at once. :mod:`gspo_hpc.data.prompts` makes prompts of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.schema import Data
from gspo_hpc.data.counting import JSONL, PARQUET, files, wrong_name
from gspo_hpc.system.progress import mark

FIRST_BYTES = 2**20  # of the rows that are looked at where not all are
_FIRST = 20  # rows of a larger parquet file that are looked at, which has no lines
SHOWN = 10  # malformed rows that an error lists
ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Row:
    """One checked row of a data file."""

    index: int  # place among the rows of the file, from 0
    where: str  # FILE:LINE of a JSONL file, FILE:row N of a parquet file; counted from 1
    prompt: str | Messages
    fields: dict[str, Any]  # all other fields

    @property
    def text(self) -> str:
        """The prompt without a chat template: of a list of messages the last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


def load_rows(path: str | Path, data: Data) -> list[Row]:
    """Return all rows of a .jsonl or .parquet file, or of all files that a pattern matches. Blank lines are no rows.

    A prompt is text, or a list of chat messages {role, content} that ends with the user's. Raises ValueError with
    every malformed row (the first ten by file and line), or if the file is missing, empty or of another kind.
    """
    return _checked(path, data, None)


def first_rows(path: str | Path, data: Data) -> list[Row]:
    """Return the rows at the beginning of the data: all of them where the files have up to FIRST_BYTES.

    They are checked as by :func:`load_rows`. There may be none, if the first one is longer than that, or if it is in a
    parquet file too large to look into.
    """
    return _checked(path, data, FIRST_BYTES)


def _checked(path: str | Path, data: Data, most_bytes: int | None) -> list[Row]:
    parts = files(path)
    for part in parts:
        if (wrong := wrong_name(part)) is not None:
            raise ValueError(wrong)
        if part.is_dir():
            raise ValueError(f"{part} is a folder: give a file, or a pattern such as {part}/*{JSONL}")
        if part.exists() and not part.is_file():
            raise ValueError(f"{part} is not a regular file, which can be read several times")
    if not parts:
        raise ValueError(f"{path}: no file matches")
    rows: list[Row] = []
    faults: list[str] = []
    count = 0
    try:
        whole = most_bytes is None or sum(part.stat().st_size for part in parts) <= most_bytes
        for where, raw in _rows(parts, None if whole else most_bytes):
            count += 1
            mark()
            try:
                if isinstance(raw, ValueError):
                    raise raw
                rows.append(_row(len(rows), where, raw, data))
            except ValueError as fault:
                faults.append(f"{where}: {fault}")
    except OSError as error:
        raise ValueError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    if faults:
        seen = f"{count}" if whole else f"the first {count}"
        raise ValueError(listed(f"{path}: {len(faults)} of {seen} rows cannot be used", faults))
    if not rows and whole:
        raise ValueError(f"{path} has no rows; it needs at least one, with {data.prompt_key!r} in it")
    return rows


def _row(index: int, where: str, raw: Any, data: Data) -> Row:
    if _kind(raw) != "an object":
        raise ValueError(f"a row must be an object with {data.prompt_key!r} in it, not {_kind(raw)}")
    if data.prompt_key not in raw:
        raise ValueError(
            f"it has no {data.prompt_key!r} (data.prompt_key); it has: {', '.join(map(str, raw)) or 'nothing'}"
        )
    fields = {key: value for key, value in raw.items() if key != data.prompt_key}
    try:
        json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its fields must be values that JSON can hold: {error}") from None
    prompt = raw[data.prompt_key]
    if isinstance(prompt, str):
        given = {"system_prompt": data.system_prompt, "chat_template_kwargs": data.chat_template_kwargs or None}
        for name in (name for name, value in given.items() if value is not None and not data.chat_template):
            raise ValueError(f"data.{name} needs a chat template for text prompts, but data.chat_template=false")
        return Row(index, where, _text(prompt, "the prompt"), fields)
    if _kind(prompt) != "a list":
        raise ValueError(f"the prompt is {_kind(prompt)}: it must be text or a list of chat messages")
    if not prompt:
        raise ValueError("the prompt is empty")
    messages = [_message(number, message) for number, message in enumerate(prompt, 1)]
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("only the first message can be a system message")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message has the role {messages[-1]['role']!r}: it must have the role 'user'")
    return Row(index, where, messages, fields)


def _message(number: int, message: Any) -> dict[str, str]:
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else None
    if given is None or set(given) != {"role", "content"}:
        what = f"has {', '.join(map(str, given)) or 'nothing'}" if given is not None else f"is {_kind(message)}"
        raise ValueError(f"message {number} {what}: it must have role and content, and nothing else")
    if given["role"] not in ROLES:
        raise ValueError(f"message {number} has the role {given['role']!r}: it must be one of {', '.join(ROLES)}")
    if _kind(given["content"]) != "text":
        raise ValueError(f"the content of message {number} is {_kind(given['content'])}: it must be text")
    return {"role": given["role"], "content": _text(given["content"], f"message {number}")}


def _text(text: str, what: str) -> str:
    if not text.strip():
        raise ValueError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} contains half of a character (a lone surrogate)") from None
    return text


def _jsonl(path: Path, most_bytes: int | None) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file if most_bytes is None else _lines(file, most_bytes), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield where, ValueError(f"not UTF-8 at byte {error.start + 1} of the line")
            except json.JSONDecodeError as error:
                yield where, ValueError(f"not JSON: {error.msg} at character {error.pos + 1}")
            except (ValueError, RecursionError) as error:
                yield where, ValueError(f"not JSON that can be read: {error}")


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines that end within so many bytes."""
    left = most_bytes
    while (line := file.readline(left + 1)) and len(line) <= left:
        left -= len(line)
        yield line


def _parquet(path: Path, most_bytes: int | None) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    if most_bytes is not None and size > WHOLE_FILE_BYTES:  # one group of its rows may be as large
        return
    few = most_bytes is not None and size > most_bytes
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_FIRST) if few else file.iter_batches():
                for raw in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", raw
                if few:
                    return
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


_READERS = {JSONL: _jsonl, PARQUET: _parquet}


def _rows(parts: Iterable[Path], most_bytes: int | None) -> Iterator[tuple[str, Any]]:
    left = most_bytes
    for part in parts:
        yield from _READERS[part.suffix](part, left)
        if left is not None:
            left -= part.stat().st_size
            if left <= 0:
                return


def listed(headline: str, faults: list[str]) -> str:
    """Return a headline and the first faults under it, with the number of the others."""
    more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    return "\n  ".join([headline, *faults[:SHOWN], *more])


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "bool": "true or false"}
    names |= {"int": "a number", "float": "a number"}
    return names.get(type(value).__name__, type(value).__name__)
